// Running minimum of each row of a [rows, 8 * blocks] matrix, eight columns a step, the least so far carried along.
func.func @prefix_minimum(%x: !tile.ptr<f32>, %o: !tile.ptr<f32>, %blocks: i32) {
  %row = tile.program_id 0
  %zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %eight = arith.constant 8 : i32
  %column = tile.range : tensor<8xi32>
  %stride = arith.muli %blocks, %eight : i32
  %first = arith.muli %row, %stride : i32
  %high = arith.constant 1.000000e+30 : f32
  %start = tile.splat %high : f32 -> tensor<1xf32>
  %least = scf.for %i = %zero to %blocks step %one iter_args(%so_far = %start) -> (tensor<1xf32>) : i32 {
    %skip = arith.muli %i, %eight : i32
    %place = arith.addi %first, %skip : i32
    %base = tile.splat %place : i32 -> tensor<8xi32>
    %at = arith.addi %base, %column : tensor<8xi32>
    %v = tile.load %x[%at] : !tile.ptr<f32>, tensor<8xi32> -> tensor<8xf32>
    %run = tile.scan min %v, 0 : tensor<8xf32> -> tensor<8xf32>
    %before = tile.broadcast %so_far : tensor<1xf32> -> tensor<8xf32>
    %y = arith.minnumf %run, %before : tensor<8xf32>
    tile.store %y, %o[%at] : tensor<8xf32>, !tile.ptr<f32>, tensor<8xi32>
    %here = tile.reduce min %y, 0 : tensor<8xf32> -> tensor<1xf32>
    scf.yield %here : tensor<1xf32>
  }
  func.return
}
