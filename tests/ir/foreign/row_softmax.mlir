// One program a row of n <= 64 numbers.
func.func @row_softmax(%x: !tile.ptr<f32>, %o: !tile.ptr<f32>, %n: i32) {
  %row = tile.program_id 0
  %column = tile.range : tensor<64xi32>
  %width = tile.splat %n : i32 -> tensor<64xi32>
  %inside = tile.compare slt %column, %width : tensor<64xi32>, tensor<64xi32> -> tensor<64xi1>
  %first = arith.muli %row, %n : i32
  %base = tile.splat %first : i32 -> tensor<64xi32>
  %at = arith.addi %base, %column : tensor<64xi32>
  %low = arith.constant -1.000000e+30 : f32
  %lows = tile.splat %low : f32 -> tensor<64xf32>
  %v = tile.load %x[%at] mask %inside : tensor<64xi1> other %lows : tensor<64xf32> : !tile.ptr<f32>, tensor<64xi32> -> tensor<64xf32>
  %top = tile.reduce max %v, 0 : tensor<64xf32> -> tensor<1xf32>
  %tops = tile.broadcast %top : tensor<1xf32> -> tensor<64xf32>
  %shifted = arith.subf %v, %tops : tensor<64xf32>
  %weight = math.exp %shifted : tensor<64xf32>
  %total = tile.reduce add %weight, 0 : tensor<64xf32> -> tensor<1xf32>
  %totals = tile.broadcast %total : tensor<1xf32> -> tensor<64xf32>
  %y = arith.divf %weight, %totals : tensor<64xf32>
  tile.store %y, %o[%at] mask %inside : tensor<64xi1> : tensor<64xf32>, !tile.ptr<f32>, tensor<64xi32>
  func.return
}
