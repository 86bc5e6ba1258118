// o[i] = x[i * stride] for i < n, with elements of 16 bits and offsets of 64.
func.func @strided_copy(%x: !tile.ptr<i16>, %o: !tile.ptr<i16>, %stride: i64, %n: i64) {
  %block = tile.program_id 0
  %wide = tile.cast unsigned %block : i32 -> i64
  %size = arith.constant 32 : i64
  %first = arith.muli %wide, %size : i64
  %lane = tile.range : tensor<32xi32>
  %lanes = tile.cast unsigned %lane : tensor<32xi32> -> tensor<32xi64>
  %base = tile.splat %first : i64 -> tensor<32xi64>
  %i = arith.addi %base, %lanes : tensor<32xi64>
  %limit = tile.splat %n : i64 -> tensor<32xi64>
  %inside = tile.compare ult %i, %limit : tensor<32xi64>, tensor<32xi64> -> tensor<32xi1>
  %strides = tile.splat %stride : i64 -> tensor<32xi64>
  %from = arith.muli %i, %strides : tensor<32xi64>
  %v = tile.load %x[%from] mask %inside : tensor<32xi1> : !tile.ptr<i16>, tensor<32xi64> -> tensor<32xi16>
  tile.store %v, %o[%i] mask %inside : tensor<32xi1> : tensor<32xi16>, !tile.ptr<i16>, tensor<32xi64>
  func.return
}
