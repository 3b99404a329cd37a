//! The client library: `libstitchd_client.so`, for any process that can call C.
//!
//! [`ffi`] is the border and nothing else: check, catch, convert. [`process`] is the one session of the process behind it, [`tags`] are what can sleep by itself, [`shares`] its shared ranges, [`admission`] has its iterations wait for their peaks, and [`captures`] says what goes to memory of captured graphs.

mod admission;
mod captures;
pub mod ffi;
mod process;
mod shares;
mod tags;
