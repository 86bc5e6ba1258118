builtin.module {
  func.func @row_softmax(%x: !tile.ptr<f32>, %o: !tile.ptr<f32>, %n: i32) attributes {simt.threads = 32 : i64} {
    %0 = memref.alloc() : memref<1xf32, #simt<space shared>>
    %1 = memref.alloc() : memref<1xf32, #simt<space shared>>
    %thread = simt.thread_id
    %row = simt.block_id 0
    %first = arith.muli %row, %n : i32
    %low = arith.constant -1.000000e+30 : f32
    %2 = arith.constant 32 : i32
    %3 = arith.remui %thread, %2 : i32
    %4 = arith.divui %thread, %2 : i32
    %5 = arith.constant 0xff800000 : f32
    %6 = arith.constant 0 : i32
    %7 = arith.constant 2 : i32
    %8 = arith.constant 1 : i32
    %9 = scf.for %10 = %6 to %7 step %8 iter_args(%11 = %5) -> (f32) : i32 {
      %12 = arith.muli %10, %2 : i32
      %13 = arith.addi %12, %3 : i32
      %14 = arith.addi %first, %13 : i32
      %15 = arith.cmpi slt, %13, %n : i32
      %16 = simt.load %x[%14] mask %15 other %low : f32 : !tile.ptr<f32>, i32 -> f32
      %17 = arith.maxnumf %11, %16 : f32
      scf.yield %17 : f32
    }
    %18 = simt.shuffle xor %9, 16 width 32 mask 4294967295 : f32 -> f32
    %19 = arith.maxnumf %9, %18 : f32
    %20 = simt.shuffle xor %19, 8 width 32 mask 4294967295 : f32 -> f32
    %21 = arith.maxnumf %19, %20 : f32
    %22 = simt.shuffle xor %21, 4 width 32 mask 4294967295 : f32 -> f32
    %23 = arith.maxnumf %21, %22 : f32
    %24 = simt.shuffle xor %23, 2 width 32 mask 4294967295 : f32 -> f32
    %25 = arith.maxnumf %23, %24 : f32
    %26 = simt.shuffle xor %25, 1 width 32 mask 4294967295 : f32 -> f32
    %27 = arith.maxnumf %25, %26 : f32
    %28 = arith.cmpi slt, %3, %8 : i32
    %29 = arith.index_cast %4 : i32 to index
    scf.if %28 {
      memref.store %27, %1[%29] : memref<1xf32, #simt<space shared>>
    }
    simt.barrier
    %30 = arith.remui %thread, %2 : i32
    %31 = arith.constant -0.000000e+00 : f32
    %32 = arith.index_cast %6 : i32 to index
    %33 = memref.load %1[%32] : memref<1xf32, #simt<space shared>>
    %34 = scf.for %35 = %6 to %7 step %8 iter_args(%36 = %31) -> (f32) : i32 {
      %37 = arith.muli %35, %2 : i32
      %38 = arith.addi %37, %30 : i32
      %39 = arith.addi %first, %38 : i32
      %40 = arith.cmpi slt, %38, %n : i32
      %41 = simt.load %x[%39] mask %40 other %low : f32 : !tile.ptr<f32>, i32 -> f32
      %42 = arith.subf %41, %33 : f32
      %43 = math.exp %42 : f32
      %44 = arith.addf %36, %43 : f32
      scf.yield %44 : f32
    }
    %45 = simt.shuffle xor %34, 16 width 32 mask 4294967295 : f32 -> f32
    %46 = arith.addf %34, %45 : f32
    %47 = simt.shuffle xor %46, 8 width 32 mask 4294967295 : f32 -> f32
    %48 = arith.addf %46, %47 : f32
    %49 = simt.shuffle xor %48, 4 width 32 mask 4294967295 : f32 -> f32
    %50 = arith.addf %48, %49 : f32
    %51 = simt.shuffle xor %50, 2 width 32 mask 4294967295 : f32 -> f32
    %52 = arith.addf %50, %51 : f32
    %53 = simt.shuffle xor %52, 1 width 32 mask 4294967295 : f32 -> f32
    %54 = arith.addf %52, %53 : f32
    %55 = arith.cmpi slt, %30, %8 : i32
    scf.if %55 {
      memref.store %54, %0[%29] : memref<1xf32, #simt<space shared>>
    }
    simt.barrier
    %56 = memref.load %1[%32] : memref<1xf32, #simt<space shared>>
    %57 = memref.load %0[%32] : memref<1xf32, #simt<space shared>>
    scf.for %58 = %6 to %7 step %8 : i32 {
      %59 = arith.muli %58, %2 : i32
      %60 = arith.addi %59, %thread : i32
      %61 = arith.addi %first, %60 : i32
      %62 = arith.cmpi slt, %60, %n : i32
      %63 = simt.load %x[%61] mask %62 other %low : f32 : !tile.ptr<f32>, i32 -> f32
      %64 = arith.subf %63, %56 : f32
      %65 = math.exp %64 : f32
      %66 = arith.divf %65, %57 : f32
      scf.if %62 {
        simt.store %66, %o[%61] : f32, !tile.ptr<f32>, i32
      }
    }
    func.return
  }
}
