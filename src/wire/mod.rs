//! What goes between processes: the messages of `proto/stitchd/v1` ([`v1`], generated), their conversion to and from the types of the house
//! ([`convert`]), errors as both sides see them ([`status`]), packets with descriptors ([`fd_channel`]), and who is at the other end ([`peer`]),
//! the layout of the pages that sessions write their figures to ([`stats_page`]), and how messages become bytes ([`codec`]).
//!
//! Not for: what is said when. Proto types stop here; no other module hands them on.

pub(crate) mod codec;
pub mod convert;
pub mod fd_channel;
pub mod peer;
pub mod stats_page;
pub mod status;

/// The generated messages and services.
#[expect(missing_docs, reason = "generated; the documentation is in the .proto file")]
#[expect(clippy::allow_attributes_without_reason, reason = "generated")]
#[cfg_attr(feature = "daemon", expect(clippy::allow_attributes, reason = "generated"))]
pub mod v1 {
    tonic::include_proto!("stitchd.v1");
}

/// The protocol that this build speaks.
pub const PROTOCOL: u32 = 1;
/// The layout of stats pages that this build writes and reads.
pub const STATS_PAGE_VERSION: u32 = 1;
/// The services' description, for gRPC reflection.
#[cfg(feature = "daemon")]
pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("stitchd.v1");
