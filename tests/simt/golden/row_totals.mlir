builtin.module {
  func.func @row_totals(%x: !tile.ptr<i16> {tile.align = 16 : i64}, %o: !tile.ptr<f32>, %n: i32) attributes {simt.threads = 32 : i64} {
    %0 = memref.alloc() : memref<8xf32, #simt<space shared>>
    %1 = memref.alloc() : memref<128xi16, #simt<space shared>>
    %thread = simt.thread_id
    %block = simt.block_id 0
    %size = arith.constant 8 : i32
    %length = arith.constant 16 : i32
    %first = arith.muli %block, %size : i32
    %2 = arith.cmpi slt, %thread, %length : i32
    %3 = arith.constant 0 : i32
    %4 = arith.constant 2 : i32
    scf.if %2 {
      %5 = arith.remui %thread, %4 : i32
      %6 = arith.divui %thread, %4 : i32
      %7 = arith.muli %5, %size : i32
      %8 = arith.muli %thread, %size : i32
      %9 = arith.index_cast %8 : i32 to index
      %10 = arith.addi %first, %6 : i32
      %11 = arith.muli %10, %length : i32
      %12 = arith.addi %11, %7 : i32
      %13 = arith.cmpi slt, %10, %n : i32
      simt.copy %x[%12] mask %13 to %1[%9] : !tile.ptr<i16>, i32, memref<128xi16, #simt<space shared>>
    }
    simt.barrier
    %14 = arith.constant 4 : i32
    %15 = arith.remui %thread, %14 : i32
    %16 = arith.divui %thread, %14 : i32
    %17 = arith.constant -0.000000e+00 : f32
    %18 = arith.constant 1 : i32
    %19 = arith.muli %16, %length : i32
    %20 = scf.for %21 = %3 to %14 step %18 iter_args(%22 = %17) -> (f32) : i32 {
      %23 = arith.muli %21, %14 : i32
      %24 = arith.addi %23, %15 : i32
      %25 = arith.addi %19, %24 : i32
      %26 = arith.index_cast %25 : i32 to index
      %27 = memref.load %1[%26] : memref<128xi16, #simt<space shared>>
      %28 = arith.sitofp %27 : i16 to f32
      %29 = arith.addf %22, %28 : f32
      scf.yield %29 : f32
    }
    %30 = simt.shuffle xor %20, 2 width 32 mask 4294967295 : f32 -> f32
    %31 = arith.addf %20, %30 : f32
    %32 = simt.shuffle xor %31, 1 width 32 mask 4294967295 : f32 -> f32
    %33 = arith.addf %31, %32 : f32
    %34 = arith.cmpi slt, %15, %18 : i32
    %35 = arith.index_cast %16 : i32 to index
    scf.if %34 {
      memref.store %33, %0[%35] : memref<8xf32, #simt<space shared>>
    }
    simt.barrier
    %36 = arith.cmpi slt, %thread, %size : i32
    scf.if %36 {
      %37 = arith.addi %first, %thread : i32
      %38 = arith.index_cast %thread : i32 to index
      %39 = memref.load %0[%38] : memref<8xf32, #simt<space shared>>
      %40 = arith.cmpi slt, %37, %n : i32
      scf.if %40 {
        simt.store %39, %o[%37] : f32, !tile.ptr<f32>, i32
      }
    }
    func.return
  }
}
