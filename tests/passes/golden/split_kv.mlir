// A loop over n trips becomes a run of ceil(n / shares) of them in each program of grid axis 1.
func.func @total(%x: !tile.ptr<f32>, %n: i32, %slot: i32, %shares: i32, %o: !tile.ptr<f32>) {
  %zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %nothing = arith.constant 0.0 : f32
  %sum = scf.for %i = %zero to %n step %one iter_args(%a = %nothing) -> (f32) : i32 {
    %v = tile.load %x[%i] : !tile.ptr<f32>, i32 -> f32
    %b = arith.addf %a, %v : f32
    scf.yield %b : f32
  }
  tile.store %sum, %o[%slot] : f32, !tile.ptr<f32>, i32
  func.return
}
// CHECK:       func.func @total(%x: !tile.ptr<f32>, %n: i32, %shares: i32, %o: !tile.ptr<f32>)
// CHECK-NEXT:  %[[PLACE:.*]] = tile.program_id 1
// CHECK:       %[[RUN:.*]] = arith.divui %{{.*}}, %shares
// CHECK:       %[[AT:.*]] = arith.muli %[[PLACE]], %[[RUN]]
// CHECK:       %[[START:.*]] = arith.minsi %{{.*}}, %n
// CHECK:       %[[END:.*]] = arith.addi %[[START]], %[[RUN]]
// CHECK-NEXT:  %[[STOP:.*]] = arith.minsi %[[END]], %n
// CHECK:       scf.for %{{.*}} = %[[START]] to %[[STOP]]
// CHECK:       tile.store %{{.*}}, %o[%[[PLACE]]]
