//! Names of things, one type each, so that a chunk number never lands where a session number belongs.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id! {
    /// A device of this process, by its ordinal. On the wire devices go by their [`DeviceUuid`].
    DeviceId(u32), "device "
}
id! {
    /// A chunk of the daemon. Never reused while the daemon lives.
    ChunkId(u64), "chunk "
}
id! {
    /// A session of the daemon. Never reused while the daemon lives.
    SessionId(u64), "session "
}
id! {
    /// One acquire, from asking to its answer. Never reused while the daemon lives.
    RequestId(u64), "request "
}
id! {
    /// A shared range of the daemon. Never reused while the daemon lives.
    RangeId(u64), "range "
}
id! {
    /// A plan, by the checksum of its contents: the same plan has the same id everywhere.
    PlanId(u64), "plan "
}
id! {
    /// A buffer of a problem: its index there.
    BufferId(u32), "buffer "
}
id! {
    /// A stream as the caller names it: the raw handle of the driver; 0 is the default stream.
    StreamId(u64), "stream "
}

impl StreamId {
    /// The stream that work goes to when nobody says otherwise.
    pub const DEFAULT: StreamId = StreamId(0);
}

impl PlanId {
    /// The id as people and files write it: sixteen hexadecimal digits.
    pub fn to_hex(self) -> String {
        format!("{:016x}", self.0)
    }

    /// Reads what [`PlanId::to_hex`] wrote.
    pub fn from_hex(text: &str) -> Option<PlanId> {
        // Whatever else a number may look like: each plan has one file.
        u64::from_str_radix(text, 16).ok().map(PlanId).filter(|id| id.to_hex() == text)
    }
}

/// A device wherever it is seen from: ordinals differ between processes, this does not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

impl DeviceUuid {
    /// The uuid that [`fmt::Display`] wrote, or `None`. Capital letters are the same digits.
    pub fn parse(text: &str) -> Option<DeviceUuid> {
        let digits: String = text.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
        let uuid = DeviceUuid(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes());
        uuid.to_string().eq_ignore_ascii_case(text).then_some(uuid)
    }
}

/// Spelt as NVIDIA's tools spell it: `GPU-8-4-4-4-12`.
impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_survives_being_written_and_read() {
        let uuid = DeviceUuid(*b"stitchd-host-002");
        assert_eq!(uuid.to_string().len(), "GPU-00000000-0000-0000-0000-000000000000".len());
        assert_eq!(DeviceUuid::parse(&uuid.to_string()), Some(uuid));
        assert_eq!(DeviceUuid::parse(&uuid.to_string().replace("6f", "6F")), Some(uuid));
        for text in [
            "",
            "GPU-",
            "GPU-zz",
            "00000000-0000-0000-0000-000000000000",
            "GPU-é0000000000000000000000000000000",
            "GPU-+3000000-0000-0000-0000-000000000000",
            "GPU-00000000000000000000000000000000",
        ] {
            assert_eq!(DeviceUuid::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_plan_id_survives_being_written_and_read() {
        assert_eq!(PlanId::from_hex(&PlanId(0x12ab).to_hex()), Some(PlanId(0x12ab)));
        for text in ["12ab", "+0000000000012ab", "00000000000012AB"] {
            assert_eq!(PlanId::from_hex(text), None, "{text}");
        }
    }
}
