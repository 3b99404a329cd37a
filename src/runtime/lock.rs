//! The lock of the pools: taken with one atomic exchange, given back with a plain store.
//!
//! It is held for tens of nanoseconds, millions of times a second, and hardly ever wanted by two. A lock that wakes its waiters must exchange at the
//! end, too, to learn of them, and that is a fifth of an allocation. Here who finds it taken looks again for a microsecond or two, then sleeps a little
//! (Linux makes some 70 µs of the shortest sleep) and looks again: whoever holds it for longer is mapping memory or asking for events, which takes as long.
//! One thread at a time looks; the others wait for its place, asleep: of a thousand that all looked, none would find a core to get on with.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, SpinMutex, SpinMutexGuard, hint, thread};

/// Looks before the first sleep.
const LOOKS: u32 = 64;
/// The first sleep, and what it doubles up to.
const SLEEP: Duration = Duration::from_micros(10);
const SLEEP_MAX: Duration = Duration::from_micros(160);

/// After a panic under it, it is never free again, and who wants it panics, too: a panic there is a bug, and serving on from unknown books could overlap two
/// tensors.
#[derive(Debug)]
pub(super) struct Lock<T> {
    inner: SpinMutex<T>,
    /// The place of the one that looks until it is free.
    looks: Mutex<()>,
    /// Somebody panicked who held it.
    is_broken: AtomicBool,
}

pub(super) struct Held<'a, T> {
    /// There until the end.
    guard: Option<SpinMutexGuard<'a, T>>,
    is_broken: &'a AtomicBool,
    was_panicking: bool,
}

impl<T> Lock<T> {
    pub(super) fn new(inner: T) -> Lock<T> {
        Lock { inner: SpinMutex::new(inner), looks: Mutex::new(()), is_broken: AtomicBool::new(false) }
    }

    /// Waits for it and takes it.
    pub(super) fn lock(&self) -> Held<'_, T> {
        Held { guard: Some(self.take()), is_broken: &self.is_broken, was_panicking: std::thread::panicking() }
    }

    /// The same around one step, for where every instruction counts: a panic is noticed by its unwinding, and costs nothing where there is none.
    #[inline]
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut T) -> R) -> R {
        struct Breaks<'a>(&'a AtomicBool);
        impl Drop for Breaks<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let breaks = Breaks(&self.is_broken);
        let mut guard = ManuallyDrop::new(self.take());
        let done = step(&mut guard);
        drop(ManuallyDrop::into_inner(guard));
        std::mem::forget(breaks);
        done
    }

    #[inline]
    fn take(&self) -> SpinMutexGuard<'_, T> {
        match self.inner.try_lock() {
            Some(guard) => guard,
            None => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> SpinMutexGuard<'_, T> {
        let _looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sleep = SLEEP;
        loop {
            assert!(!self.is_broken.load(Ordering::Acquire), "no step of the pools panics");
            for _ in 0..LOOKS {
                hint::spin_loop();
                if !self.inner.is_locked()
                    && let Some(guard) = self.inner.try_lock()
                {
                    return guard;
                }
            }
            thread::sleep(sleep);
            sleep = (sleep * 2).min(SLEEP_MAX);
        }
    }

    /// What it protects, for its only owner; `None` when somebody panicked who held it.
    pub(super) fn get_mut(&mut self) -> Option<&mut T> {
        (!*self.is_broken.get_mut()).then(|| self.inner.get_mut())
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.guard.as_deref().expect("it is there until the end")
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_deref_mut().expect("it is there until the end")
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if !self.was_panicking && std::thread::panicking() {
            self.is_broken.store(true, Ordering::Release);
            std::mem::forget(self.guard.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_at_a_time_and_all_get_their_turn() {
        const EACH: u64 = 20_000;
        let lock = Lock::new((0_u64, 0_u64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for step in 0..EACH {
                        let mut both = lock.lock();
                        both.0 += 1;
                        if step % 4096 == 0 {
                            std::thread::sleep(Duration::from_micros(300));
                        }
                        both.1 += 1;
                        assert_eq!(both.0, both.1);
                    }
                });
            }
        });
        assert_eq!(lock.lock().0, 4 * EACH);
    }

    #[test]
    fn a_panic_under_it_breaks_it_and_one_that_was_under_way_does_not() {
        struct UsesIt<'a>(&'a Lock<u32>);
        impl Drop for UsesIt<'_> {
            fn drop(&mut self) {
                *self.0.lock() += 1;
            }
        }
        let mut lock = Lock::new(0);
        std::thread::scope(|scope| {
            let unwinds = scope.spawn(|| {
                let _uses = UsesIt(&lock);
                panic!("outside the lock");
            });
            assert!(unwinds.join().is_err());
        });
        assert_eq!(*lock.lock(), 1);
        std::thread::scope(|scope| {
            let breaks = scope.spawn(|| {
                let _held = lock.lock();
                panic!("under the lock");
            });
            assert!(breaks.join().is_err());
            assert!(scope.spawn(|| *lock.lock()).join().is_err());
            assert!(scope.spawn(|| lock.with(|count| *count += 1)).join().is_err());
        });
        assert_eq!(lock.get_mut(), None);
    }

    #[test]
    fn a_step_that_panics_breaks_it() {
        let lock = Lock::new(0);
        lock.with(|count| *count += 1);
        std::thread::scope(|scope| {
            let breaks = scope.spawn(|| lock.with(|_| panic!("in the step")));
            assert!(breaks.join().is_err());
            assert!(scope.spawn(|| lock.with(|count| *count)).join().is_err());
        });
    }
}
