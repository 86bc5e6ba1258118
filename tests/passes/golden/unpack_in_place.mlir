// The second field of a word stays where it is; the other factor takes 2^-2.
func.func @weighted(%p_at: !tile.ptr<f32>, %w_at: !tile.ptr<i32>, %o: !tile.ptr<f32>) {
  %i8 = tile.range : tensor<8xi32>
  %i32 = tile.range : tensor<32xi32>
  %i8r = tile.reshape %i8 : tensor<8xi32> -> tensor<2x4xi32>
  %i32r = tile.reshape %i32 : tensor<32xi32> -> tensor<4x8xi32>
  %p = tile.load %p_at[%i8r] : !tile.ptr<f32>, tensor<2x4xi32> -> tensor<2x4xf32>
  %w = tile.load %w_at[%i32r] : !tile.ptr<i32>, tensor<4x8xi32> -> tensor<4x8xi32>
  %two = arith.constant 2 : i32
  %three = arith.constant 3 : i32
  %twos = tile.splat %two : i32 -> tensor<4x8xi32>
  %threes = tile.splat %three : i32 -> tensor<4x8xi32>
  %down = arith.shrui %w, %twos : tensor<4x8xi32>
  %code = arith.andi %down, %threes : tensor<4x8xi32>
  %c = tile.cast unsigned %code : tensor<4x8xi32> -> tensor<4x8xf32>
  %pe = tile.expand %p, 2 : tensor<2x4xf32> -> tensor<2x4x1xf32>
  %ce = tile.expand %c, 0 : tensor<4x8xf32> -> tensor<1x4x8xf32>
  %pb = tile.broadcast %pe : tensor<2x4x1xf32> -> tensor<2x4x8xf32>
  %cb = tile.broadcast %ce : tensor<1x4x8xf32> -> tensor<2x4x8xf32>
  %x = arith.mulf %pb, %cb : tensor<2x4x8xf32>
  %r = tile.reduce add %x, 1 : tensor<2x4x8xf32> -> tensor<2x1x8xf32>
  %i16 = tile.range : tensor<16xi32>
  %i16r = tile.reshape %i16 : tensor<16xi32> -> tensor<2x1x8xi32>
  tile.store %r, %o[%i16r] : tensor<2x1x8xf32>, !tile.ptr<f32>, tensor<2x1x8xi32>
  func.return
}
// CHECK-NOT:   arith.shrui
// CHECK:       %[[P:.*]] = tile.load %p_at
// CHECK:       %[[W:.*]] = tile.load %w_at
// CHECK-DAG:   %[[TOP:.*]] = arith.constant 12 : i32
// CHECK-DAG:   %[[TOPS:.*]] = tile.splat %[[TOP]]
// CHECK:       %[[KEPT:.*]] = arith.andi %[[W]], %[[TOPS]] : tensor<4x8xi32>
// CHECK:       %[[DOWN:.*]] = arith.constant 2.500000e-01 : f32
// CHECK:       %[[DOWNS:.*]] = tile.splat %[[DOWN]]
// CHECK:       arith.mulf %[[P]], %[[DOWNS]] : tensor<2x4xf32>
// CHECK:       tile.cast unsigned %[[KEPT]] : tensor<4x8xi32> -> tensor<4x8xf32>
// CHECK:       tile.reduce add
