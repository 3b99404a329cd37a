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
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
    pub(crate) use shuttle::thread;

    /// What is held while this is there.
    pub(crate) type SpinMutexGuard<'a, T> = MutexGuard<'a, T>;

    /// The part of a spinning lock that is one step: to take it, or to find it taken.
    #[derive(Debug)]
    pub(crate) struct SpinMutex<T>(Mutex<T>);

    impl<T> SpinMutex<T> {
        pub(crate) fn new(inner: T) -> SpinMutex<T> {
            SpinMutex(Mutex::new(inner))
        }

        pub(crate) fn try_lock(&self) -> Option<SpinMutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }

        pub(crate) fn is_locked(&self) -> bool {
            self.try_lock().is_none()
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }
}
#[cfg(feature = "model")]
pub(crate) use model::*;
