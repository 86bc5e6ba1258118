// o[r] = the sum of x[r, :] for r < n, with rows of 16 elements of 16 bits, which lie in memory as runs that a GPU loads at once.
func.func @row_totals(%x: !tile.ptr<i16> {tile.align = 16 : i64}, %o: !tile.ptr<f32>, %n: i32) {
  %block = tile.program_id 0
  %size = arith.constant 8 : i32
  %length = arith.constant 16 : i32
  %first = arith.muli %block, %size : i32
  %r = tile.range : tensor<8xi32>
  %base = tile.splat %first : i32 -> tensor<8xi32>
  %row = arith.addi %base, %r : tensor<8xi32>
  %limit = tile.splat %n : i32 -> tensor<8xi32>
  %inside = tile.compare slt %row, %limit : tensor<8xi32>, tensor<8xi32> -> tensor<8xi1>
  %lengths = tile.splat %length : i32 -> tensor<8xi32>
  %start = arith.muli %row, %lengths : tensor<8xi32>
  %starts = tile.expand %start, 1 : tensor<8xi32> -> tensor<8x1xi32>
  %from = tile.broadcast %starts : tensor<8x1xi32> -> tensor<8x16xi32>
  %c = tile.range : tensor<16xi32>
  %column = tile.expand %c, 0 : tensor<16xi32> -> tensor<1x16xi32>
  %columns = tile.broadcast %column : tensor<1x16xi32> -> tensor<8x16xi32>
  %at = arith.addi %from, %columns : tensor<8x16xi32>
  %rows = tile.expand %inside, 1 : tensor<8xi1> -> tensor<8x1xi1>
  %mask = tile.broadcast %rows : tensor<8x1xi1> -> tensor<8x16xi1>
  %v = tile.load %x[%at] mask %mask : tensor<8x16xi1> : !tile.ptr<i16>, tensor<8x16xi32> -> tensor<8x16xi16>
  %f = tile.cast signed %v : tensor<8x16xi16> -> tensor<8x16xf32>
  %sum = tile.reduce add %f, 1 : tensor<8x16xf32> -> tensor<8x1xf32>
  %total = tile.reshape %sum : tensor<8x1xf32> -> tensor<8xf32>
  tile.store %total, %o[%row] mask %inside : tensor<8xi1> : tensor<8xf32>, !tile.ptr<f32>, tensor<8xi32>
  func.return
}
