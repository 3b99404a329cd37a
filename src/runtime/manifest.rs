//! What a live allocation is made of: which bytes of which chunk are visible where.

use std::sync::Arc;

use super::{NotLive, Pools, Runtime};
use crate::driver::DriverError;
use crate::error::ErrorKind;
use crate::ids::ChunkId;
use crate::memory::Chunk;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// A part of an allocation that lies in one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it is visible.
    pub span: AddressSpan,
    /// Where it begins in the chunk.
    pub offset: Bytes,
    /// The chunk, as the daemon calls it.
    pub chunk: ChunkId,
    /// The chunk, as the driver calls it (`CUmemGenericAllocationHandle`, `hipMemGenericAllocationHandle_t`; a descriptor's number on the host driver). It is good as long as
    /// the allocation lives, and stays ours: whoever keeps it longer retains or exports it.
    pub handle: u64,
}

/// Why there is no manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The address is no live allocation's first.
    #[error(transparent)]
    NotLive(#[from] NotLive),
    /// The driver does not tell its handle.
    #[error("the driver does not tell a chunk's handle")]
    Driver(#[from] DriverError),
}

impl ManifestError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ManifestError::NotLive(_) => ErrorKind::NotFound,
            ManifestError::Driver(error) => error.kind(),
        }
    }
}

impl Runtime {
    /// What a live allocation is made of, from its first byte to the end of its block, which is whole chunks for large ones. Libraries that register memory with a network card or open it in another process ask the
    /// driver about an address and hear of one chunk only (`cuMemGetAddressRange`): with this they can go piece by piece.
    pub fn manifest(&self, address: DeviceAddress) -> Result<Vec<Piece>, ManifestError> {
        let pieces = self.lock().pieces(address);
        if pieces.is_empty() {
            return Err(NotLive(address).into());
        }
        let piece = |(span, offset, chunk): (AddressSpan, Bytes, Arc<Chunk>)| {
            Ok(Piece { span, offset, chunk: chunk.id(), handle: chunk.native_handle()? })
        };
        pieces.into_iter().map(piece).collect()
    }
}

impl Pools {
    /// The chunks behind a live allocation: where each part of it is visible, where that begins in the chunk, and the chunk. Nothing if it is not live.
    pub(super) fn pieces(&self, address: DeviceAddress) -> Vec<(AddressSpan, Bytes, Arc<Chunk>)> {
        let Some(span) = self.len_of(address).and_then(|len| Span::new(address, len)) else { return Vec::new() };
        let planned = self.planned.as_ref().filter(|installed| installed.pool.len_of(address).is_some());
        let planned = planned.map(|installed| self.pages.chunks_in(installed.site, span));
        let planned = planned.map(|chunks| chunks.map(|(start, chunk)| (start, Arc::clone(chunk))).collect());
        let chunks: Vec<(DeviceAddress, Arc<Chunk>)> = match planned {
            Some(chunks) => chunks,
            None if self.private.len_of(address).is_some() => self.private.chunks_at(address),
            None => self.pages.chunks_at(address),
        };
        let part = |(start, chunk): (DeviceAddress, Arc<Chunk>)| {
            let from = start.max(span.start());
            let until = start.checked_add(chunk.len())?.min(span.end());
            let visible = Span::new(from, until.checked_distance(from)?).filter(|visible| !visible.is_empty())?;
            Some((visible, from.checked_distance(start)?, chunk))
        };
        chunks.into_iter().filter_map(part).collect()
    }
}
