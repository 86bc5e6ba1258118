// Three carried values change places; names that a printer might think of itself are taken by others.
func.func @named(%o: !tile.ptr<i32>, %n: i32) {
  %zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %two = arith.constant 2 : i32
  %a0 = arith.constant 11 : i32
  %b0 = arith.constant 22 : i32
  %c0 = arith.constant 33 : i32
  %a_old = arith.addi %c0, %n : i32
  %a1, %b1, %c1 = scf.for %i = %zero to %n step %one iter_args(%a = %a0, %b = %b0, %i_at = %c0) -> (i32, i32, i32) : i32 {
    scf.yield %a_old, %a, %b : i32, i32, i32
  }
  tile.store %a1, %o[%zero] : i32, !tile.ptr<i32>, i32
  tile.store %b1, %o[%one] : i32, !tile.ptr<i32>, i32
  tile.store %c1, %o[%two] : i32, !tile.ptr<i32>, i32
  func.return
}
