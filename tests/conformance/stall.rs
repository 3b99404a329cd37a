//! Busy streams of a stand-in's process: the library of a machine has two functions more than a vendor's, which a test finds by their names.
#![expect(unsafe_code, reason = "calls C functions of the stand-in")]

use std::any::Any;
use std::ffi::c_int;

use libloading::Library;
use stitchd::ids::{DeviceId, StreamId};

use crate::standin::Machine;

/// The functions of one machine's library: the same copy that the driver has loaded, and so the same process's state.
pub(crate) struct Stalls {
    library: Library,
}

impl Stalls {
    pub(crate) fn of(machine: &Machine) -> Stalls {
        // SAFETY: the stand-in's library has no initialisers.
        Stalls { library: unsafe { Library::new(machine.library()) }.unwrap() }
    }

    /// Makes a stream busy until the answer is dropped.
    pub(crate) fn stall(&self, device: DeviceId, stream: StreamId) -> Box<dyn Any> {
        let mut stall = 0;
        // SAFETY: the stand-in has a function of this name and signature (its header).
        let begin = unsafe { self.library.get::<unsafe extern "C" fn(c_int, u64, *mut u64) -> c_int>("standin_stall") };
        // SAFETY: the place for the answer lives through the call.
        let code = unsafe { begin.unwrap()(device.0 as c_int, stream.0, &raw mut stall) };
        assert_eq!(code, 0);
        // SAFETY: as above.
        let end = unsafe { self.library.get::<unsafe extern "C" fn(u64) -> c_int>("standin_resume") };
        Box::new(Busy { end: *end.unwrap(), stall })
    }
}

/// A stream that is busy. The library stays loaded: the driver that is tested never unloads it.
struct Busy {
    end: unsafe extern "C" fn(u64) -> c_int,
    stall: u64,
}

impl Drop for Busy {
    fn drop(&mut self) {
        // SAFETY: it takes a number, and the library is loaded.
        let code = unsafe { (self.end)(self.stall) };
        // What was queued behind it may have gone where it must not.
        assert!([0, 700].contains(&code), "{code}");
    }
}
