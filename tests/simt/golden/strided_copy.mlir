builtin.module {
  func.func @strided_copy(%x: !tile.ptr<i16>, %o: !tile.ptr<i16>, %stride: i64, %n: i64) attributes {simt.threads = 32 : i64} {
    %thread = simt.thread_id
    %block = simt.block_id 0
    %wide = arith.extui %block : i32 to i64
    %size = arith.constant 32 : i64
    %first = arith.muli %wide, %size : i64
    %0 = arith.extui %thread : i32 to i64
    %1 = arith.addi %first, %0 : i64
    %2 = arith.muli %1, %stride : i64
    %3 = arith.cmpi ult, %1, %n : i64
    %4 = arith.constant 0 : i16
    %5 = simt.load %x[%2] mask %3 other %4 : i16 : !tile.ptr<i16>, i64 -> i16
    scf.if %3 {
      simt.store %5, %o[%1] : i16, !tile.ptr<i16>, i64
    }
    func.return
  }
}
