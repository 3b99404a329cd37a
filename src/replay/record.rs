//! What a pool did over a whole replay, for pictures.

use crate::units::{Bytes, DeviceAddress};

/// One pool's replay, step by step.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Bytes live and reserved, wherever one of them changed.
    pub curve: Vec<Point>,
    /// Where every allocation lay.
    pub placed: Vec<Placed>,
}

/// Bytes from one event on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// The event, counted as in [`crate::trace::Trace::events`]; in iterations that were repeated, beyond its end.
    pub event: u32,
    /// Bytes asked for and not given back.
    pub live: Bytes,
    /// Bytes of the device that the pool keeps from others.
    pub reserved: Bytes,
}

/// One allocation in time and address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The event that asked for it, counted as in [`Point`].
    pub from: u32,
    /// The event that gave it back; `u32::MAX` if none did.
    pub until: u32,
    /// Its event in [`crate::trace::Trace::events`], for module and phase; the same as `from` where nothing was repeated.
    pub event: u32,
    /// Its first byte.
    pub address: DeviceAddress,
    /// Bytes asked for.
    pub bytes: Bytes,
}
