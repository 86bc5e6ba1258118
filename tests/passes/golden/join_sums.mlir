// Two lanes are added before they are reduced; what is not a reduction stays a term.
func.func @lanes(%x_at: !tile.ptr<f32>, %y_at: !tile.ptr<f32>, %z_at: !tile.ptr<f32>, %o: !tile.ptr<f32>) {
  %i32 = tile.range : tensor<32xi32>
  %i4 = tile.range : tensor<4xi32>
  %at = tile.reshape %i32 : tensor<32xi32> -> tensor<4x8xi32>
  %x = tile.load %x_at[%at] : !tile.ptr<f32>, tensor<4x8xi32> -> tensor<4x8xf32>
  %y = tile.load %y_at[%at] : !tile.ptr<f32>, tensor<4x8xi32> -> tensor<4x8xf32>
  %z = tile.load %z_at[%i4] : !tile.ptr<f32>, tensor<4xi32> -> tensor<4xf32>
  %rx = tile.reduce add %x, 1 : tensor<4x8xf32> -> tensor<4x1xf32>
  %ry = tile.reduce add %y, 1 : tensor<4x8xf32> -> tensor<4x1xf32>
  %sx = tile.reshape %rx : tensor<4x1xf32> -> tensor<4xf32>
  %sy = tile.reshape %ry : tensor<4x1xf32> -> tensor<4xf32>
  %a = arith.addf %sx, %z : tensor<4xf32>
  %b = arith.addf %a, %sy : tensor<4xf32>
  tile.store %b, %o[%i4] : tensor<4xf32>, !tile.ptr<f32>, tensor<4xi32>
  func.return
}
// CHECK:       %[[X:.*]] = tile.load %x_at
// CHECK:       %[[Y:.*]] = tile.load %y_at
// CHECK:       %[[Z:.*]] = tile.load %z_at
// CHECK-NEXT:  %[[SUM:.*]] = arith.addf %[[X]], %[[Y]] : tensor<4x8xf32>
// CHECK-NEXT:  %[[R:.*]] = tile.reduce add %[[SUM]], 1
// CHECK-NEXT:  %[[S:.*]] = tile.reshape %[[R]]
// CHECK-NEXT:  %[[OUT:.*]] = arith.addf %[[S]], %[[Z]] : tensor<4xf32>
// CHECK-NEXT:  tile.store %[[OUT]]
