//! Messages to types of the house, and back. Whatever comes from outside is checked here, before anything uses it.

use super::v1;
use crate::ids::{ChunkId, DeviceUuid, PlanId};
use crate::ladder::Shape;
use crate::limits;
use crate::units::Bytes;

/// A message that says something impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct Malformed {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it.
    pub what: String,
}

/// An error about `field`.
pub fn malformed(field: &'static str, what: impl Into<String>) -> Malformed {
    Malformed { field, what: what.into() }
}

/// What somebody wants, with a device that may or may not exist.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WantedChunks {
    /// Where.
    pub device: DeviceUuid,
    /// Bytes.
    pub len: Bytes,
    /// In which chunks.
    pub shape: Shape,
    /// The plan whose reserved chunks may be used.
    pub plan: Option<PlanId>,
    /// Milliseconds that others may be waited for.
    pub wait_ms: u64,
    /// Milliseconds that it has been waited for already, of a daemon before this one.
    pub waited_ms: u64,
}

/// Sixteen bytes that prove something.
pub type Token = [u8; 16];

/// Reads a ticket or secret.
pub fn token(field: &'static str, bytes: &[u8]) -> Result<Token, Malformed> {
    bytes.try_into().map_err(|_| malformed(field, format!("{} bytes, and it should have 16", bytes.len())))
}

/// Reads a device's uuid.
pub fn device_uuid(field: &'static str, bytes: &[u8]) -> Result<DeviceUuid, Malformed> {
    token(field, bytes).map(DeviceUuid)
}

/// Reads a device's ordinal.
pub fn ordinal(field: &'static str, ordinal: u32) -> Result<u32, Malformed> {
    if ordinal >= limits::ORDINALS_MAX {
        return Err(malformed(field, format!("{ordinal}; ordinals are below {}", limits::ORDINALS_MAX)));
    }
    Ok(ordinal)
}

/// Reads a size that is not zero.
pub fn size(field: &'static str, bytes: u64) -> Result<Bytes, Malformed> {
    let size = Bytes::new(bytes);
    if size.is_zero() || size > limits::ACQUIRE_BYTES_MAX {
        return Err(malformed(field, format!("{bytes} bytes; it must be 1 to {}", limits::ACQUIRE_BYTES_MAX.get())));
    }
    Ok(size)
}

/// Reads a name.
pub fn name(field: &'static str, text: &str) -> Result<String, Malformed> {
    name_up_to(field, text, limits::NAME_LEN_MAX)
}

/// The same for a name that Kubernetes gives.
pub fn pod_name(field: &'static str, text: &str) -> Result<String, Malformed> {
    name_up_to(field, text, limits::POD_NAME_LEN_MAX)
}

fn name_up_to(field: &'static str, text: &str, most: usize) -> Result<String, Malformed> {
    if text.len() > most {
        return Err(malformed(field, format!("{} bytes; at most {most}", text.len())));
    }
    Ok(text.chars().map(|c| if c.is_control() || turns(c) { '\u{fffd}' } else { c }).collect())
}

/// It has what follows shown in another direction, which makes names look like others (Unicode, UAX 9).
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Which plans are wanted; whatever is not said may be anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WantedPlans {
    /// Of this job.
    pub fingerprint: Option<u64>,
    /// Of this process of it, counted from 0.
    pub rank: Option<u32>,
    /// Of so many; not without a rank.
    pub world_size: Option<u32>,
}

impl TryFrom<v1::PlanFor> for WantedPlans {
    type Error = Malformed;

    fn try_from(wanted: v1::PlanFor) -> Result<WantedPlans, Malformed> {
        let v1::PlanFor { fingerprint, rank, world_size } = wanted;
        let most = limits::WORLD_SIZE_MAX;
        match (rank, world_size) {
            (None, Some(_)) => Err(malformed("job.rank", "none, of a world that is named")),
            (Some(rank), None) if rank >= most => {
                Err(malformed("job.rank", format!("{rank}; it must be below {most}")))
            }
            (Some(rank), Some(world_size)) if rank >= world_size || world_size > most => {
                Err(malformed("job.rank", format!("{rank} of {world_size}; worlds have 1 to {most}")))
            }
            _ => Ok(WantedPlans { fingerprint, rank, world_size }),
        }
    }
}

impl From<WantedPlans> for v1::PlanFor {
    fn from(wanted: WantedPlans) -> v1::PlanFor {
        let WantedPlans { fingerprint, rank, world_size } = wanted;
        v1::PlanFor { fingerprint, rank, world_size }
    }
}

impl TryFrom<v1::Want> for WantedChunks {
    type Error = Malformed;

    fn try_from(want: v1::Want) -> Result<WantedChunks, Malformed> {
        let shape = match want.shape {
            None => {
                return Err(malformed(
                    "want.shape",
                    "none of largest, uniform_bytes, at_most_bytes, fitted_bytes and idle_first_bytes",
                ));
            }
            Some(v1::want::Shape::Largest(v1::Largest {})) => Shape::Largest,
            Some(v1::want::Shape::UniformBytes(bytes)) => Shape::Uniform(size("want.uniform_bytes", bytes)?),
            Some(v1::want::Shape::FittedBytes(bytes)) => Shape::Exactly(size("want.fitted_bytes", bytes)?),
            Some(v1::want::Shape::IdleFirstBytes(bytes)) => Shape::Fitted(size("want.idle_first_bytes", bytes)?),
            Some(v1::want::Shape::AtMostBytes(bytes)) => Shape::AtMost(size("want.at_most_bytes", bytes)?),
        };
        if want.wait_ms > limits::WAIT_MS_MAX {
            return Err(malformed("want.wait_ms", format!("{}; at most {}", want.wait_ms, limits::WAIT_MS_MAX)));
        }
        Ok(WantedChunks {
            device: device_uuid("want.device_uuid", &want.device_uuid)?,
            len: size("want.len_bytes", want.len_bytes)?,
            shape,
            plan: (want.plan_id != 0).then_some(PlanId(want.plan_id)),
            wait_ms: want.wait_ms,
            waited_ms: want.waited_ms,
        })
    }
}

impl From<WantedChunks> for v1::Want {
    fn from(wanted: WantedChunks) -> v1::Want {
        v1::Want {
            device_uuid: wanted.device.0.to_vec(),
            len_bytes: wanted.len.get(),
            shape: Some(match wanted.shape {
                Shape::Largest => v1::want::Shape::Largest(v1::Largest {}),
                Shape::Uniform(len) => v1::want::Shape::UniformBytes(len.get()),
                Shape::Fitted(len) => v1::want::Shape::IdleFirstBytes(len.get()),
                Shape::Exactly(len) => v1::want::Shape::FittedBytes(len.get()),
                Shape::AtMost(len) => v1::want::Shape::AtMostBytes(len.get()),
            }),
            plan_id: wanted.plan.map_or(0, |plan| plan.0),
            wait_ms: wanted.wait_ms.min(limits::WAIT_MS_MAX),
            waited_ms: wanted.waited_ms,
        }
    }
}

/// Reads the chunks of a release.
pub fn chunk_ids(field: &'static str, ids: &[u64]) -> Result<Vec<ChunkId>, Malformed> {
    if ids.len() > limits::RELEASE_CHUNKS_MAX {
        return Err(malformed(field, format!("{} chunks; at most {}", ids.len(), limits::RELEASE_CHUNKS_MAX)));
    }
    Ok(ids.iter().copied().map(ChunkId).collect())
}

/// Reads a manifest: every chunk has a possible size.
pub fn chunks(field: &'static str, infos: &[v1::ChunkInfo]) -> Result<Vec<(ChunkId, Bytes)>, Malformed> {
    let read = |info: &v1::ChunkInfo| {
        let len = Bytes::new(info.len_bytes);
        if len < limits::CHUNK_LEN_MIN || len > limits::CHUNK_LEN_MAX {
            return Err(malformed(field, format!("a chunk of {} bytes", info.len_bytes)));
        }
        Ok((ChunkId(info.chunk_id), len))
    };
    infos.iter().map(read).collect()
}

/// Writes a manifest.
pub fn chunk_infos(chunks: &[(ChunkId, Bytes)]) -> Vec<v1::ChunkInfo> {
    chunks.iter().map(|(chunk, len)| v1::ChunkInfo { chunk_id: chunk.0, len_bytes: len.get() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want() -> v1::Want {
        WantedChunks {
            device: DeviceUuid([7; 16]),
            len: Bytes::mib(5),
            shape: Shape::Uniform(Bytes::mib(2)),
            plan: Some(PlanId(9)),
            wait_ms: 100,
            waited_ms: 7,
        }
        .into()
    }

    #[test]
    fn a_want_survives_being_sent() {
        let wanted = WantedChunks::try_from(want()).unwrap();
        assert_eq!(v1::Want::from(wanted), want());
    }

    #[test]
    fn plans_are_wanted_of_a_process_that_there_can_be() {
        let read = |rank, world_size| {
            let wanted = WantedPlans { fingerprint: Some(7), rank, world_size };
            let read = WantedPlans::try_from(v1::PlanFor::from(wanted));
            assert!(read == Ok(wanted) || read.as_ref().is_err_and(|error| error.field == "job.rank"), "{read:?}");
            read.is_ok()
        };
        let most = limits::WORLD_SIZE_MAX;
        assert!(read(None, None) && read(Some(0), None) && read(Some(7), Some(8)) && read(Some(0), Some(most)));
        assert!(!read(None, Some(8)) && !read(Some(8), Some(8)) && !read(Some(0), Some(most + 1)));
        assert!(!read(Some(most), None) && !read(Some(0), Some(0)));
    }

    #[test]
    fn what_is_impossible_is_refused_by_field() {
        let field = |change: &dyn Fn(&mut v1::Want)| {
            let mut changed = want();
            change(&mut changed);
            WantedChunks::try_from(changed).unwrap_err().field
        };
        assert_eq!(field(&|want| want.device_uuid = vec![1; 15]), "want.device_uuid");
        assert_eq!(field(&|want| want.len_bytes = 0), "want.len_bytes");
        assert_eq!(field(&|want| want.len_bytes = u64::MAX), "want.len_bytes");
        assert_eq!(field(&|want| want.shape = None), "want.shape");
        assert_eq!(field(&|want| want.shape = Some(v1::want::Shape::UniformBytes(0))), "want.uniform_bytes");
        assert_eq!(field(&|want| want.wait_ms = u64::MAX), "want.wait_ms");
        assert!(chunk_ids("chunks", &vec![1; limits::RELEASE_CHUNKS_MAX + 1]).is_err());
        assert!(chunks("chunks", &[v1::ChunkInfo { chunk_id: 1, len_bytes: 1 }]).is_err());
        assert!(name("name", &"x".repeat(200)).is_err());
        assert_eq!(name("name", "a\nb\u{1b}").unwrap(), "a\u{fffd}b\u{fffd}");
        assert_eq!(name("name", "a\u{202e}b\u{2066}").unwrap(), "a\u{fffd}b\u{fffd}");
    }
}
