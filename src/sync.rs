//! Where threads meet: atomics, locks, waiting. A normal build has the standard library's and `spin`'s under these names, and nothing of its own.
//!
//! With the feature `model` the same names come from shuttle, which runs the threads of a test one step at a time, in an order that it chooses: so
//! `tests/concurrency` finds orders that a machine hardly ever takes. Only code whose threads share something uses this module, and only such a test
//! may run what uses it in such a build.
//!
//! Not for: orderings of memory. Shuttle's atomics are sequentially consistent whatever they are asked for.

#[cfg(not(feature = "model"))]
mod plain {
    pub(crate) use std::hint;
    pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
    pub(crate) use std::thread;

    pub(crate) use spin::mutex::{SpinMutex, SpinMutexGuard};
}
#[cfg(not(feature = "model"))]
pub(crate) use plain::*;

#[cfg(feature = "model")]
mod model {
    pub(crate) use shuttle::hint;
    pub(crate) use shuttle::sync::atomic;
    pub(crate) use shuttle::thread;

    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, PoisonError};

    use atomic::{AtomicBool, Ordering};
    use shuttle::sync as inner;

    /// A lock behind whose end others may step in: shuttle's own goes on to the next thing that it knows, and what is done until then, to a driver say,
    /// would look like a part of what was done under the lock.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T> {
        inner: inner::Mutex<T>,
        ended: AtomicBool,
    }

    /// The lock of the runtime, which spins: its part that is one step, to take it or to find it taken.
    pub(crate) type SpinMutex<T> = Mutex<T>;
    pub(crate) type SpinMutexGuard<'a, T> = MutexGuard<'a, T>;

    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T> {
        /// There until the end.
        inner: Option<inner::MutexGuard<'a, T>>,
        ended: &'a AtomicBool,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(inner: T) -> Mutex<T> {
            Mutex { inner: inner::Mutex::new(inner), ended: AtomicBool::new(false) }
        }

        fn held<'a>(&'a self, inner: inner::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            MutexGuard { inner: Some(inner), ended: &self.ended }
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            let held = |inner| self.held(inner);
            self.inner.lock().map(held).map_err(|poisoned| PoisonError::new(held(poisoned.into_inner())))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.inner.try_lock().ok().map(|inner| self.held(inner))
        }

        pub(crate) fn is_locked(&self) -> bool {
            self.inner.try_lock().is_err()
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.inner.as_deref().expect("it is there until the end")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.inner.as_deref_mut().expect("it is there until the end")
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.inner = None;
            // Here others may step in.
            self.ended.load(Ordering::SeqCst);
        }
    }
}
#[cfg(feature = "model")]
pub(crate) use model::*;
