//! What PyTorch's pluggable allocator calls. Not for anybody else: plain C has the functions of the module above, which never unwind.
//!
//! Invariant: what unwinds is PyTorch's own exception, raised by its own function, and by the time it does nothing of the library is in a middle state: no lock is held and no Rust code catches it.

#![expect(unsafe_code, reason = "exports C symbols, and calls what the process's PyTorch exports")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use super::{stitch_last_error, stitch_malloc};

/// The library that has PyTorch's errors, by the name under which the loader knows it once it is in the process.
const LIBRARY: &CStr = c"libc10.so";
/// `c10::detail::torchCheckFail(char const*, char const*, unsigned, char const*)`: throws a `c10::Error` with the last text.
const THROWS: &CStr = c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_";
/// How the text begins by which training programs know that memory has run out, whoever made the device.
const OUT_OF_MEMORY: &str = "CUDA out of memory.";

type TorchCheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// `stitch_malloc` for PyTorch, whose callers do not look for NULL: never NULL for a size above 0. When it fails it raises PyTorch's own error, a C++ exception that Python sees as a RuntimeError, with a text that begins
/// with "CUDA out of memory." (by which training programs know that a smaller batch may help) and goes on with what `stitch_last_error` says.
///
/// NULL is returned for a size of 0, and in a process without PyTorch (libc10.so), where there is nothing to raise; then `stitch_last_error` says why.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn stitch_torch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let ptr = stitch_malloc(size, device, stream);
    if ptr.is_null() && size > 0 {
        raise_out_of_memory();
    }
    ptr
}

/// Does not come back where PyTorch is.
#[cold]
fn raise_out_of_memory() {
    let Some(raise) = torch_check_fail() else { return };
    // SAFETY: never NULL, ends in NUL, and nobody on this thread fails before it is copied.
    let why = unsafe { CStr::from_ptr(stitch_last_error()) };
    let text = CString::new(format!("{OUT_OF_MEMORY} stitchd: {}", why.to_string_lossy())).unwrap_or_default();
    // SAFETY: it is the function of that name, whose mangled form has these arguments; all of them end in NUL, and it has copied the text when it unwinds, which drops ours.
    unsafe { raise(c"stitch_torch_malloc".as_ptr(), c"stitchd".as_ptr(), 0, text.as_ptr()) }
}

fn torch_check_fail() -> Option<TorchCheckFail> {
    // SAFETY: the name ends in NUL; nothing is loaded, and no code runs, by asking for what is there already.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // Programs that have it linked in show its symbols to all.
    let place = if library.is_null() { libc::RTLD_DEFAULT } else { library };
    // SAFETY: the name ends in NUL. What `dlopen` counted is not taken back: the library stays.
    let symbol = unsafe { libc::dlsym(place, THROWS.as_ptr()) };
    // SAFETY: a mangled name says what its arguments are, and this one's are these; NULL is `None`.
    unsafe { std::mem::transmute::<*mut c_void, Option<TorchCheckFail>>(symbol) }
}
