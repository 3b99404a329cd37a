//! Which allocations go to private pools: those on streams that the filter of an open pool accepts, as PyTorch's own allocator routes them.
//!
//! Nothing but one load where no pool is open. The runtime keeps the pools; this keeps who goes there.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use stitchd::runtime::PrivatePoolId;
use stitchd::session::fork;

use crate::ffi::filter::Filter;
use crate::process;

struct Route {
    device: i32,
    pool: PrivatePoolId,
    filter: Filter,
}

/// In the order in which they were begun: the first that accepts has it.
static ROUTES: Mutex<Vec<Route>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn routes() -> MutexGuard<'static, Vec<Route>> {
    ROUTES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The private pool for an allocation of this thread on `stream`, if there is one. May unwind as the filters do.
#[inline]
pub(crate) fn pool_for(device: i32, stream: *mut c_void) -> Option<PrivatePoolId> {
    if COUNT.load(Ordering::Acquire) == 0 { None } else { route(device, stream) }
}

#[cold]
fn route(device: i32, stream: *mut c_void) -> Option<PrivatePoolId> {
    if fork::is_child() {
        return None;
    }
    let mut routes = routes();
    let mut accepts = routes.iter_mut().filter(|route| route.device == device);
    accepts.find_map(|route| route.filter.accepts(stream).then_some(route.pool))
}

/// From now on what `filter` accepts goes to `pool`.
pub(crate) fn begin(device: i32, pool: PrivatePoolId, filter: Filter) -> Result<(), String> {
    process::runtime(device)?.begin_private(pool);
    let mut routes = routes();
    routes.push(Route { device, pool, filter });
    COUNT.store(routes.len(), Ordering::Release);
    Ok(())
}

/// The last route to `pool` that was begun ends.
pub(crate) fn end(device: i32, pool: PrivatePoolId) -> Result<(), String> {
    let Some(runtime) = process::existing(device) else { return Ok(()) };
    let ended = {
        let mut routes = routes();
        let at = routes.iter().rposition(|route| route.device == device && route.pool == pool);
        let ended = at.map(|at| routes.remove(at));
        COUNT.store(routes.len(), Ordering::Release);
        ended
    };
    // Its filter ends outside of the lock: what it does then is its own affair.
    drop(ended);
    if runtime.end_private(pool) { Ok(()) } else { Err(not_there("open", device, pool)) }
}

/// What was allocated in `pool` is not replayed any more.
pub(crate) fn release(device: i32, pool: PrivatePoolId) -> Result<(), String> {
    let Some(runtime) = process::existing(device) else { return Ok(()) };
    if runtime.release_private(pool) { Ok(()) } else { Err(not_there("there", device, pool)) }
}

fn not_there(what: &str, device: i32, pool: PrivatePoolId) -> String {
    format!("the private pool {}.{} of device {device} is not {what}", pool.0, pool.1)
}
