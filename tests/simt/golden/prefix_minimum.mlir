builtin.module {
  func.func @prefix_minimum(%x: !tile.ptr<f32>, %o: !tile.ptr<f32>, %blocks: i32) attributes {simt.threads = 32 : i64} {
    %0 = memref.alloca() : memref<1xf32>
    %1 = memref.alloc() : memref<1xf32, #simt<space shared>>
    %2 = memref.alloc() : memref<8xf32, #simt<space shared>>
    %3 = memref.alloca() : memref<1xf32>
    %4 = memref.alloc() : memref<1xf32, #simt<space shared>>
    %thread = simt.thread_id
    %row = simt.block_id 0
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %eight = arith.constant 8 : i32
    %stride = arith.muli %blocks, %eight : i32
    %first = arith.muli %row, %stride : i32
    %high = arith.constant 1.000000e+30 : f32
    %5 = arith.cmpi slt, %thread, %one : i32
    %6 = arith.index_cast %zero : i32 to index
    scf.if %5 {
      memref.store %high, %3[%6] : memref<1xf32>
    }
    scf.if %5 {
      %7 = memref.load %3[%6] : memref<1xf32>
      %8 = arith.index_cast %thread : i32 to index
      memref.store %7, %4[%8] : memref<1xf32, #simt<space shared>>
    }
    %9 = arith.constant 0x7f800000 : f32
    scf.for %i = %zero to %blocks step %one : i32 {
      %skip = arith.muli %i, %eight : i32
      %place = arith.addi %first, %skip : i32
      scf.if %5 {
        %10 = scf.for %11 = %zero to %eight step %one iter_args(%12 = %9) -> (f32) : i32 {
          %13 = arith.addi %place, %11 : i32
          %14 = simt.load %x[%13] : !tile.ptr<f32>, i32 -> f32
          %15 = arith.minnumf %12, %14 : f32
          %16 = arith.index_cast %11 : i32 to index
          memref.store %15, %2[%16] : memref<8xf32, #simt<space shared>>
          scf.yield %15 : f32
        }
      }
      simt.barrier
      %17 = arith.cmpi slt, %thread, %eight : i32
      %18 = memref.load %4[%6] : memref<1xf32, #simt<space shared>>
      scf.if %17 {
        %19 = arith.addi %place, %thread : i32
        %20 = arith.index_cast %thread : i32 to index
        %21 = memref.load %2[%20] : memref<8xf32, #simt<space shared>>
        %22 = arith.minnumf %21, %18 : f32
        simt.store %22, %o[%19] : f32, !tile.ptr<f32>, i32
      }
      %23 = arith.remui %thread, %eight : i32
      %24 = arith.divui %thread, %eight : i32
      %25 = arith.cmpi slt, %24, %one : i32
      %26 = arith.index_cast %23 : i32 to index
      %27 = memref.load %2[%26] : memref<8xf32, #simt<space shared>>
      %28 = memref.load %4[%6] : memref<1xf32, #simt<space shared>>
      %29 = arith.minnumf %27, %28 : f32
      %30 = arith.minnumf %9, %29 : f32
      %31 = simt.shuffle xor %30, 4 width 32 mask 4294967295 : f32 -> f32
      %32 = arith.minnumf %30, %31 : f32
      %33 = simt.shuffle xor %32, 2 width 32 mask 4294967295 : f32 -> f32
      %34 = arith.minnumf %32, %33 : f32
      %35 = simt.shuffle xor %34, 1 width 32 mask 4294967295 : f32 -> f32
      %36 = arith.minnumf %34, %35 : f32
      %37 = arith.cmpi slt, %23, %one : i32
      %38 = arith.andi %37, %25 : i1
      %39 = arith.index_cast %24 : i32 to index
      scf.if %38 {
        memref.store %36, %1[%39] : memref<1xf32, #simt<space shared>>
      }
      simt.barrier
      %40 = memref.load %1[%6] : memref<1xf32, #simt<space shared>>
      scf.if %5 {
        memref.store %40, %0[%6] : memref<1xf32>
      }
      scf.if %5 {
        %41 = memref.load %0[%6] : memref<1xf32>
        %42 = arith.index_cast %thread : i32 to index
        memref.store %41, %4[%42] : memref<1xf32, #simt<space shared>>
      }
      simt.barrier
    }
    func.return
  }
}
