//! Raises PyTorch's own errors, by what the process's PyTorch exports. Nothing is linked: where a name is missing the next way is taken.
//!
//! | way | what Python sees | needs |
//! |---|---|---|
//! | a `c10::OutOfMemoryError` | `torch.OutOfMemoryError` | its vtable and type, which the core's library for devices exports, and its base's constructor, which the core does |
//! | a `c10::Error` | `RuntimeError` | `c10::detail::torchCheckFail`, which the core exports |
//!
//! The first is made as a C++ compiler makes it (Itanium C++ ABI, sections 2.5.2 and 2.5.3 of its part on exceptions): storage from `__cxa_allocate_exception`, the base's constructor, the vtable of the class that it is to be,
//! `__cxa_throw`. `OutOfMemoryError` has no fields of its own (c10/util/Exception.h), so its base is all there is to construct. *Not* done: catching what `torchCheckFail` throws and throwing another: Rust does not catch what is foreign.

#![expect(unsafe_code, reason = "calls what the process's PyTorch and C++ library export")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// PyTorch's core, by the name under which the loader knows it once it is in the process.
const CORE: &CStr = c"libc10.so";
/// Its part for devices, of whichever vendor.
const DEVICES: [&CStr; 2] = [c"libc10_cuda.so", c"libc10_hip.so"];
const CPP: &CStr = c"libstdc++.so.6";

/// `c10::detail::torchCheckFail(char const*, char const*, unsigned, char const*)`: throws a `c10::Error` with the last text.
const CHECK_FAIL: &CStr = c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_";
/// `c10::Error::Error(std::string, std::shared_ptr<c10::LazyValue<std::string> const>, void const*)`.
const ERROR: &CStr =
    c"_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt10shared_ptrIKNS_9LazyValueIS6_EEEPKv";
/// The vtable of `c10::OutOfMemoryError`.
const VTABLE: &CStr = c"_ZTVN3c1016OutOfMemoryErrorE";
/// Its `std::type_info`.
const TYPE: &CStr = c"_ZTIN3c1016OutOfMemoryErrorE";
/// `std::string::string(char const*, std::allocator<char> const&)`.
const STRING: &CStr = c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_";
/// `std::string::~string()`.
const STRING_END: &CStr = c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev";

/// Room for a `c10::Error`, which took 136 bytes in PyTorch 2.6 to 2.11.
const ERROR_ROOM: usize = 1024;

/// A libstdc++ `std::string`: 32 bytes, made and ended by its own functions.
#[repr(C, align(8))]
struct CppString([u8; 32]);

type Destructor = unsafe extern "C-unwind" fn(*mut c_void);

/// Raises an error of PyTorch's with this text: the one for memory that has run out, if that is why. Comes back only in a process without PyTorch.
#[cold]
pub(super) fn no_memory(text: &CStr, has_run_out: bool) {
    if has_run_out {
        as_out_of_memory(text);
    }
    as_any_error(text);
}

/// Comes back where something of it is missing.
fn as_out_of_memory(text: &CStr) {
    type MakeString = unsafe extern "C-unwind" fn(*mut CppString, *const c_char, *const u8);
    type EndString = unsafe extern "C" fn(*mut CppString);
    type MakeError = unsafe extern "C-unwind" fn(*mut c_void, *mut CppString, *mut [usize; 2], *const c_void);
    type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
    type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Destructor) -> !;

    let core = loaded(CORE);
    let devices = DEVICES.into_iter().map(loaded).find(|library| !library.is_null()).unwrap_or(core);
    let cpp = loaded(CPP);
    let (vtable, kind) = (find(devices, VTABLE).cast::<Destructor>(), find(devices, TYPE));
    let found = [
        find(core, ERROR),
        find(cpp, STRING),
        find(cpp, STRING_END),
        find(cpp, c"__cxa_allocate_exception"),
        find(cpp, c"__cxa_throw"),
    ];
    if vtable.is_null() || kind.is_null() || found.iter().any(|symbol| symbol.is_null()) {
        return;
    }
    let [error, string, string_end, allocate, throw] = found;
    // SAFETY: what a mangled name says its arguments are: an object by value that is not trivial is passed by its address.
    let make_error = unsafe { std::mem::transmute::<*mut c_void, MakeError>(error) };
    // SAFETY: as above; the allocator has no fields.
    let make_string = unsafe { std::mem::transmute::<*mut c_void, MakeString>(string) };
    // SAFETY: as above.
    let end_string = unsafe { std::mem::transmute::<*mut c_void, EndString>(string_end) };
    // SAFETY: the ABI says what they take.
    let allocate = unsafe { std::mem::transmute::<*mut c_void, Allocate>(allocate) };
    // SAFETY: as above.
    let throw = unsafe { std::mem::transmute::<*mut c_void, Throw>(throw) };

    let (mut words, no_backtrace) = (CppString([0; 32]), &mut [0_usize; 2]);
    // SAFETY: it allocates, and ends the process where it cannot.
    let made = unsafe { allocate(ERROR_ROOM) };
    // SAFETY: there is room for a string, and the text ends in NUL.
    unsafe { make_string(&raw mut words, text.as_ptr(), &raw const words.0[0]) };
    // SAFETY: there is room for it. It takes the words out of the string, and a shared pointer that is all zeros points nowhere.
    unsafe { make_error(made, &raw mut words, no_backtrace, ptr::null()) };
    // SAFETY: made above, and nobody else's.
    unsafe { end_string(&raw mut words) };
    // Behind the offset to the top and the type; the first function is the complete object's destructor.
    let functions = vtable.wrapping_add(2);
    // SAFETY: the object begins with the pointer to its vtable, and the class that it becomes has the same fields.
    unsafe { made.cast::<*mut Destructor>().write(functions) };
    // SAFETY: a vtable has its destructor there.
    let end = unsafe { functions.read() };
    // SAFETY: an object of that type, in storage of the right kind, which is now the runtime's.
    unsafe { throw(made, kind, end) }
}

/// Comes back where there is no PyTorch.
fn as_any_error(text: &CStr) {
    type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;
    let symbol = find(loaded(CORE), CHECK_FAIL);
    if symbol.is_null() {
        return;
    }
    // SAFETY: a mangled name says what its arguments are, and this one's are these.
    let raise = unsafe { std::mem::transmute::<*mut c_void, CheckFail>(symbol) };
    // SAFETY: all of them end in NUL, and it has copied the text when it unwinds.
    unsafe { raise(c"stitch_torch_malloc".as_ptr(), c"stitchd".as_ptr(), 0, text.as_ptr()) }
}

/// A library that is in the process already; NULL where it is not.
fn loaded(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends in NUL; nothing is loaded, and no code runs, by asking for what is there already. What this counts is not taken back: the library stays.
    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
}

/// A symbol of a library, or NULL. Programs that have the library linked in show its symbols to all.
fn find(library: *mut c_void, name: &CStr) -> *mut c_void {
    let place = if library.is_null() { libc::RTLD_DEFAULT } else { library };
    // SAFETY: the name ends in NUL.
    unsafe { libc::dlsym(place, name.as_ptr()) }
}
