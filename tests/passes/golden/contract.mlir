// Products and sums may be fused; divisions and integers have no such flag.
func.func @fused(%x: f32, %y: f32, %n: i32, %o: !tile.ptr<f32>) {
  %a = arith.mulf %x, %y : f32
  %b = arith.addf %a, %x : f32
  %c = arith.divf %b, %y : f32
  %m = arith.muli %n, %n : i32
  tile.store %c, %o[%m] : f32, !tile.ptr<f32>, i32
  func.return
}
// CHECK:       arith.mulf %x, %y fastmath<contract> : f32
// CHECK-NEXT:  arith.addf %{{.*}}, %x fastmath<contract> : f32
// CHECK-NEXT:  arith.divf %{{.*}}, %y : f32
// CHECK-NEXT:  arith.muli %n, %n : i32
