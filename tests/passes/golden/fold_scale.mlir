// A score: the scale of a channel moves to the query, the origin becomes a sum of its own.
func.func @scores(%q_at: !tile.ptr<f32>, %w_at: !tile.ptr<i32>, %s_at: !tile.ptr<f32>, %m_at: !tile.ptr<f32>, %o: !tile.ptr<f32>) {
  %i8 = tile.range : tensor<8xi32>
  %i16 = tile.range : tensor<16xi32>
  %i32 = tile.range : tensor<32xi32>
  %i8r = tile.reshape %i8 : tensor<8xi32> -> tensor<1x8xi32>
  %i16r = tile.reshape %i16 : tensor<16xi32> -> tensor<2x8xi32>
  %i32r = tile.reshape %i32 : tensor<32xi32> -> tensor<4x8xi32>
  %q = tile.load %q_at[%i16r] : !tile.ptr<f32>, tensor<2x8xi32> -> tensor<2x8xf32>
  %w = tile.load %w_at[%i32r] : !tile.ptr<i32>, tensor<4x8xi32> -> tensor<4x8xi32>
  %s = tile.load %s_at[%i8r] : !tile.ptr<f32>, tensor<1x8xi32> -> tensor<1x8xf32>
  %m = tile.load %m_at[%i8r] : !tile.ptr<f32>, tensor<1x8xi32> -> tensor<1x8xf32>
  %c = tile.cast unsigned %w : tensor<4x8xi32> -> tensor<4x8xf32>
  %sb = tile.broadcast %s : tensor<1x8xf32> -> tensor<4x8xf32>
  %sc = arith.mulf %sb, %c : tensor<4x8xf32>
  %mb = tile.broadcast %m : tensor<1x8xf32> -> tensor<4x8xf32>
  %k = arith.addf %sc, %mb : tensor<4x8xf32>
  %qe = tile.expand %q, 1 : tensor<2x8xf32> -> tensor<2x1x8xf32>
  %ke = tile.expand %k, 0 : tensor<4x8xf32> -> tensor<1x4x8xf32>
  %qb = tile.broadcast %qe : tensor<2x1x8xf32> -> tensor<2x4x8xf32>
  %kb = tile.broadcast %ke : tensor<1x4x8xf32> -> tensor<2x4x8xf32>
  %p = arith.mulf %qb, %kb : tensor<2x4x8xf32>
  %r = tile.reduce add %p, 2 : tensor<2x4x8xf32> -> tensor<2x4x1xf32>
  %sum = tile.reshape %r : tensor<2x4x1xf32> -> tensor<2x4xf32>
  %i8o = tile.reshape %i8 : tensor<8xi32> -> tensor<2x4xi32>
  tile.store %sum, %o[%i8o] : tensor<2x4xf32>, !tile.ptr<f32>, tensor<2x4xi32>
  func.return
}
// CHECK:       %[[Q:.*]] = tile.load %q_at
// CHECK:       %[[S:.*]] = tile.load %s_at
// CHECK:       %[[M:.*]] = tile.load %m_at
// CHECK:       %[[C:.*]] = tile.cast unsigned
// CHECK-NOT:   arith.addf
// CHECK:       %[[SB:.*]] = tile.broadcast %[[S]] : tensor<1x8xf32> -> tensor<2x8xf32>
// CHECK-NEXT:  %[[QS:.*]] = arith.mulf %[[Q]], %[[SB]] : tensor<2x8xf32>
// CHECK-NEXT:  %[[MB:.*]] = tile.broadcast %[[M]] : tensor<1x8xf32> -> tensor<2x8xf32>
// CHECK-NEXT:  %[[QM:.*]] = arith.mulf %[[Q]], %[[MB]] : tensor<2x8xf32>
// CHECK-NEXT:  %[[CE:.*]] = tile.expand %[[C]], 0
// CHECK-NEXT:  %[[CB:.*]] = tile.broadcast %[[CE]]
// CHECK-NEXT:  %[[QE:.*]] = tile.expand %[[QS]], 1
// CHECK-NEXT:  %[[QB:.*]] = tile.broadcast %[[QE]]
// CHECK-NEXT:  %[[P:.*]] = arith.mulf %[[QB]], %[[CB]] : tensor<2x4x8xf32>
// CHECK-NEXT:  %[[R:.*]] = tile.reduce add %[[P]], 2
// CHECK-NEXT:  %[[SUM:.*]] = tile.reshape %[[R]] : tensor<2x4x1xf32> -> tensor<2x4xf32>
// CHECK-NEXT:  %[[SHIFT:.*]] = tile.reduce add %[[QM]], 1 : tensor<2x8xf32> -> tensor<2x1xf32>
// CHECK-NEXT:  %[[WIDE:.*]] = tile.broadcast %[[SHIFT]] : tensor<2x1xf32> -> tensor<2x4xf32>
// CHECK-NEXT:  %[[OUT:.*]] = arith.addf %[[SUM]], %[[WIDE]] : tensor<2x4xf32>
// CHECK:       tile.store %[[OUT]], %o
