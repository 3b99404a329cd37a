//! A `std::function<bool(cudaStream_t)>` of C++, copied so that it can be asked after the call that brought it.
//!
//! Not for: making such functions. PyTorch does, and built with the same C++ library as every PyTorch for Linux: libstdc++, whose layout of these objects has been the same since there are any.
//!
//! Invariant: a copy is made, asked and dropped by the object's own functions, which came with it.

#![expect(unsafe_code, reason = "calls functions of a C++ object")]

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// What the object keeps: a small function itself, or where a large one is.
type Functor = MaybeUninit<[usize; 2]>;
type Care = unsafe extern "C-unwind" fn(*mut Functor, *const Functor, c_int) -> bool;
type Ask = unsafe extern "C-unwind" fn(*const Functor, *mut *mut c_void) -> bool;

/// What the object's function for its own care is told to do.
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// The object, as libstdc++ lays it out.
#[repr(C)]
struct Function {
    functor: Functor,
    care: Option<Care>,
    ask: Option<Ask>,
}

/// Says for which streams something holds. Without a function it holds for all.
#[derive(Default)]
pub(crate) struct Filter(Option<(UnsafeCell<Functor>, Care, Ask)>);

// SAFETY: the function is asked by one thread at a time, whoever holds the filter, and captures nothing of the thread that made it but its number.
unsafe impl Send for Filter {}

impl Filter {
    /// A copy of the function at `object`, or one that accepts all for NULL and for an object without a function.
    ///
    /// # Safety
    ///
    /// `object` is NULL or points to a `std::function<bool(cudaStream_t)>` of libstdc++ that lives.
    pub(super) unsafe fn copy_of(object: *const c_void) -> Filter {
        // SAFETY: it lives, the caller says, and is laid out like this.
        let Some(function) = (unsafe { object.cast::<Function>().as_ref() }) else { return Filter(None) };
        let (Some(care), Some(ask)) = (function.care, function.ask) else { return Filter(None) };
        let mut functor = Functor::uninit();
        // SAFETY: it is the object's own, and makes a copy of it where there is room for one.
        unsafe { care(&raw mut functor, &raw const function.functor, CLONE) };
        Filter(Some((UnsafeCell::new(functor), care, ask)))
    }

    /// May unwind as the function does.
    pub(crate) fn accepts(&mut self, stream: *mut c_void) -> bool {
        let Some((functor, _, ask)) = &self.0 else { return true };
        let mut stream = stream;
        // SAFETY: the functor is a whole copy, asked by nobody else meanwhile; the stream is an argument by reference, as `std::function` passes them on.
        unsafe { ask(functor.get(), &raw mut stream) }
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if let Some((functor, care, _)) = &self.0 {
            // SAFETY: the copy is whole, and nobody asks it again.
            unsafe { care(functor.get(), functor.get(), DESTROY) };
        }
    }
}
