//! The options of PyTorch's allocator, from the text that `PYTORCH_CUDA_ALLOC_CONF` holds.
//!
//! Source: facts of the allocator's option parser from 2.5 to 2.15. What a version does not know it refuses, as PyTorch does.

use super::rules::{LARGE_BUFFER, MIN_LARGE_ALLOC};
use crate::error::excerpt;
use crate::units::Bytes;

/// A release of PyTorch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// The oldest that this model follows: the first with expandable segments.
    pub const OLDEST: Version = Version(2, 1);
    /// The newest that this model follows.
    pub const NEWEST: Version = Version(2, 15);
}

impl std::str::FromStr for Version {
    type Err = ConfError;

    fn from_str(text: &str) -> Result<Version, ConfError> {
        let wrong = || ConfError::Version { found: text.to_owned() };
        // What comes after tells how it was built: 2.6.0+cu124, 2.16.0a0+git1234567, 2.9.0.dev20260101.
        let mut parts = text.split('+').next().unwrap_or_default().split('.');
        let mut number = || parts.next().and_then(|part| part.parse().ok());
        let version = Version(number().ok_or_else(wrong)?, number().ok_or_else(wrong)?);
        // 2.6.0 is as good a name as 2.6.
        if parts.any(|part| !part.starts_with(|first: char| first.is_ascii_digit()) && !part.starts_with("dev")) {
            return Err(wrong());
        }
        let is_followed = (Version::OLDEST..=Version::NEWEST).contains(&version);
        if is_followed { Ok(version) } else { Err(ConfError::Unfollowed { version }) }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Why a text holds no options.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfError {
    /// No release of PyTorch.
    #[error("{found:?} is not a version of PyTorch, such as 2.6")]
    Version {
        /// What is there.
        found: String,
    },
    /// A release whose rules are not known here.
    #[error(
        "the rules of PyTorch {version} are not known here; those from {} to {} are",
        Version::OLDEST,
        Version::NEWEST
    )]
    Unfollowed {
        /// Which.
        version: Version,
    },
    /// PyTorch of this version has no such option.
    #[error("PyTorch {version} has no option {key:?}")]
    Unknown {
        /// Which.
        key: String,
        /// Of what version.
        version: Version,
    },
    /// An option's value is not what it needs.
    #[error("{key}:{found} is not {expected}")]
    Value {
        /// Which.
        key: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
}

/// The options that matter to where memory goes.
#[derive(Clone, PartialEq, Debug)]
pub struct Conf {
    /// Which release's rules.
    pub version: Version,
    /// Blocks of this size and more are not split; `u64::MAX` for no limit. Bytes.
    pub max_split: u64,
    /// How much larger such a block may be than what is asked for. Bytes.
    pub max_non_split_rounding: u64,
    /// Above this share of the limit cached blocks are given back; 0 for never.
    pub garbage_collection_threshold: f64,
    /// Segments grow in place.
    pub expandable_segments: bool,
    /// Into how many parts the stretch from one power of two to the next is divided, from 1 MiB up to 32 GiB; 0 for not at all.
    pub divisions: [u64; 16],
    /// The share of the device that this process may reserve.
    pub memory_fraction: Option<f64>,
    /// Segments of requests below 10 MiB, and pages of expandable segments. Bytes.
    pub large_segment: u64,
    /// A request over the limit is refused at once.
    pub throws_on_oom: bool,
    /// How long the address range of an expandable segment is.
    pub reserve: Reserve,
}

/// The addresses of an expandable segment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reserve {
    /// 9/8 of the device, which no other is above.
    Usual,
    /// This share of the device.
    Share(f64),
    /// So many bytes.
    Bytes(u64),
}

impl Conf {
    /// What PyTorch does when nobody asks for anything.
    pub fn of(version: Version) -> Conf {
        Conf {
            version,
            max_split: u64::MAX,
            max_non_split_rounding: LARGE_BUFFER,
            garbage_collection_threshold: 0.0,
            expandable_segments: false,
            divisions: [0; 16],
            memory_fraction: None,
            large_segment: LARGE_BUFFER,
            throws_on_oom: false,
            // An eighth more than the device has, so that there is room however it is used.
            reserve: Reserve::Usual,
        }
    }

    /// The options in `text`, such as `expandable_segments:True,max_split_size_mb:128`.
    pub fn parse(text: &str, version: Version) -> Result<Conf, ConfError> {
        Conf::of(version).and(text)
    }

    /// The same, and what this version does not know or take is left out, with the reason.
    pub fn and_what_it_knows(self, text: &str) -> (Conf, Vec<ConfError>) {
        let mut refused = Vec::new();
        let conf = top_level(text).fold(self, |conf, option| match conf.clone().and(option) {
            Ok(conf) => conf,
            Err(error) => {
                refused.push(error);
                conf
            }
        });
        (conf, refused)
    }

    /// These options, and where `text` says something else that.
    pub fn and(mut self, text: &str) -> Result<Conf, ConfError> {
        for option in top_level(text) {
            let (key, value) = option.split_once(':').unwrap_or((option, ""));
            self.set(key.trim(), value.trim())?;
        }
        if self.max_split < self.large_segment && self.large_segment != LARGE_BUFFER {
            return Err(wrong(
                "max_split_size_mb",
                &(self.max_split >> 20).to_string(),
                "at least large_segment_size_mb",
            ));
        }
        Ok(self)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ConfError> {
        let is_known = OPTIONS.into_iter().any(|(name, since)| name == key && self.version >= since);
        // The vendor's function that registers host memory may be asked for, by its name.
        let registers = key.starts_with("pinned_use_") && key.ends_with("_host_register");
        if !is_known && !registers && !PINNED.contains(&key) {
            return Err(ConfError::Unknown { key: excerpt(key, SHOWN_MAX), version: self.version });
        }
        match key {
            "max_split_size_mb" => self.max_split = self.split_size(key, value)?,
            "max_non_split_rounding_mb" => self.max_non_split_rounding = self.split_size(key, value)?,
            "garbage_collection_threshold" => {
                let share = number::<f64>(key, value, "a share between 0 and 1")?;
                if !(share > 0.0 && share < 1.0) {
                    return Err(wrong(key, value, "a share between 0 and 1"));
                }
                self.garbage_collection_threshold = share;
            }
            "expandable_segments" => self.expandable_segments = boolean(key, value)?,
            "roundup_power2_divisions" => self.divisions = divisions(key, value)?,
            "per_process_memory_fraction" => {
                let share = number::<f64>(key, value, "a share from 0 to 1")?;
                if !(0.0..=1.0).contains(&share) {
                    return Err(wrong(key, value, "a share from 0 to 1"));
                }
                self.memory_fraction = Some(share);
            }
            "large_segment_size_mb" => {
                let bytes = mib(key, value)?;
                if bytes <= MIN_LARGE_ALLOC {
                    return Err(wrong(key, value, "more than 10"));
                }
                self.large_segment = bytes;
            }
            "throw_on_cudamalloc_oom" => self.throws_on_oom = boolean(key, value)?,
            "backend" if value != "native" => return Err(wrong(key, value, "native, the allocator that is modelled")),
            // Nothing that this model has hangs on the others, but their values are as strict.
            "release_lock_on_cudamalloc" | "graph_capture_record_stream_reuse" => drop(boolean(key, value)?),
            "expandable_segments_reserve" => {
                const EXPECTED: &str = "a fraction of the device, or a number of GiB such as 16G";
                self.reserve = reserve(value).ok_or_else(|| wrong(key, value, EXPECTED))?;
            }
            // Of streams that the job has put into a class; no trace says which those are.
            "expandable_segments_reserve_by_class" => {
                let list = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
                let is_right = |part: &str| {
                    part.split_once(':').is_some_and(|(class, value)| !class.is_empty() && reserve(value).is_some())
                };
                if !list.is_some_and(|list| list.split(',').map(str::trim).all(is_right)) {
                    return Err(wrong(key, value, "a list of classes with a reserve each, such as [a:0.25,b:8G]"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn split_size(&self, key: &str, value: &str) -> Result<u64, ConfError> {
        let bytes = mib(key, value)?;
        let (least, text) = if self.version >= Version(2, 9) { (20, "20 or more") } else { (21, "more than 20") };
        if bytes < least << 20 {
            return Err(wrong(key, value, text));
        }
        Ok(bytes)
    }
}

/// Options, and since when there are.
const OPTIONS: [(&str, Version); 13] = [
    ("max_split_size_mb", Version(2, 0)),
    ("max_non_split_rounding_mb", Version(2, 5)),
    ("garbage_collection_threshold", Version(2, 0)),
    ("expandable_segments", Version(2, 1)),
    ("roundup_power2_divisions", Version(2, 0)),
    ("backend", Version(2, 0)),
    ("release_lock_on_cudamalloc", Version(2, 1)),
    ("graph_capture_record_stream_reuse", Version(2, 9)),
    ("per_process_memory_fraction", Version(2, 10)),
    ("large_segment_size_mb", Version(2, 11)),
    ("throw_on_cudamalloc_oom", Version(2, 12)),
    ("expandable_segments_reserve", Version(2, 15)),
    ("expandable_segments_reserve_by_class", Version(2, 15)),
];

/// How the host's memory is pinned is nothing that this model has.
const PINNED: [&str; 4] = [
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
];

/// So much of what somebody wrote is shown.
const SHOWN_MAX: usize = 60;

/// The parts of `text` between commas that stand in no brackets.
fn top_level(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    let parts = text.split(move |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

fn wrong(key: &str, found: &str, expected: &str) -> ConfError {
    ConfError::Value { key: key.to_owned(), found: excerpt(found, SHOWN_MAX), expected: expected.to_owned() }
}

fn number<T: std::str::FromStr>(key: &str, value: &str, expected: &str) -> Result<T, ConfError> {
    value.parse().map_err(|_| wrong(key, value, expected))
}

fn mib(key: &str, value: &str) -> Result<u64, ConfError> {
    const EXPECTED: &str = "a number of MiB";
    let bytes = Bytes::new(number(key, value, EXPECTED)?).checked_mul(1 << 20);
    bytes.filter(|bytes| *bytes <= Bytes::LARGEST).map(Bytes::get).ok_or_else(|| wrong(key, value, EXPECTED))
}

fn boolean(key: &str, value: &str) -> Result<bool, ConfError> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err(wrong(key, value, "True or False")),
    }
}

/// `0.5` or `16G`.
fn reserve(value: &str) -> Option<Reserve> {
    let gib = value.strip_suffix(['G', 'g']);
    let number = gib.unwrap_or(value).parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite())?;
    Some(if gib.is_some() { Reserve::Bytes((number * (1_u64 << 30) as f64) as u64) } else { Reserve::Share(number) })
}

/// `4` for all sizes, or `[256:1,512:2,>:8]`: from the first key down, at each key, and from the last place up.
fn divisions(key: &str, value: &str) -> Result<[u64; 16], ConfError> {
    const EXPECTED: &str = "a power of two, or a list of sizes in MiB with one each, such as [256:1,512:2,>:4]";
    let power = |text: &str| {
        let number: u64 = text.trim().parse().ok()?;
        Some(number).filter(|number| *number == 0 || number.is_power_of_two())
    };
    let Some(list) = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
        let all = power(value).filter(|all| *all > 0).ok_or_else(|| wrong(key, value, EXPECTED))?;
        return Ok([all; 16]);
    };
    let mut slots = [0; 16];
    let (mut is_first, mut last) = (true, 0);
    for part in list.split(',') {
        let (size, parts) = part.split_once(':').ok_or_else(|| wrong(key, value, EXPECTED))?;
        let parts = power(parts).ok_or_else(|| wrong(key, value, EXPECTED))?;
        if size.trim() == ">" {
            slots[last..].fill(parts);
            continue;
        }
        let size = power(size).filter(|size| *size > 0).ok_or_else(|| wrong(key, value, EXPECTED))?;
        let slot = (size.ilog2() as usize).min(15);
        if std::mem::take(&mut is_first) {
            slots[..slot].fill(parts);
        }
        slots[slot] = parts;
        last = slot;
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, version: Version) -> Result<Conf, String> {
        Conf::parse(text, version).map_err(|error| error.to_string())
    }

    #[test]
    fn options_are_read_as_pytorch_reads_them() {
        let conf = parse(
            "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,backend:native,",
            Version(2, 6),
        )
        .unwrap();
        assert!(conf.expandable_segments);
        assert_eq!((conf.max_split, conf.garbage_collection_threshold), (128 << 20, 0.8));
        assert_eq!(parse("", Version(2, 6)).unwrap(), Conf::of(Version(2, 6)));
        let one = parse("roundup_power2_divisions:4", Version(2, 6)).unwrap();
        assert_eq!(one.divisions, [4; 16]);
        let list =
            parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:64", Version(2, 6)).unwrap();
        assert_eq!(list.divisions, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8]);
        assert_eq!(list.max_split, 64 << 20);
    }

    #[test]
    fn what_a_version_refuses_is_refused() {
        for (text, version, expected) in [
            ("max_split_size_mb:20", Version(2, 6), "max_split_size_mb:20 is not more than 20"),
            ("max_split_size_mb:19", Version(2, 9), "max_split_size_mb:19 is not 20 or more"),
            ("max_split_size_mb:x", Version(2, 9), "max_split_size_mb:x is not a number of MiB"),
            ("expandable_segments:true", Version(2, 6), "expandable_segments:true is not True or False"),
            ("garbage_collection_threshold:1.0", Version(2, 6), "garbage_collection_threshold:1.0 is not a share"),
            ("per_process_memory_fraction:0.5", Version(2, 9), "PyTorch 2.9 has no option \"per_process"),
            ("large_segment_size_mb:10", Version(2, 11), "large_segment_size_mb:10 is not more than 10"),
            ("large_segment_size_mb:64,max_split_size_mb:32", Version(2, 11), "max_split_size_mb:32 is not at least"),
            ("roundup_power2_divisions:3", Version(2, 6), "roundup_power2_divisions:3 is not a power of two"),
            ("roundup_power2_divisions:[3:1]", Version(2, 6), "roundup_power2_divisions:[3:1] is not a power of two"),
            (
                "large_segment_size_mb:8796093022207",
                Version(2, 11),
                "large_segment_size_mb:8796093022207 is not a number",
            ),
            (
                "max_split_size_mb:4398046511105",
                Version(2, 11),
                "max_split_size_mb:4398046511105 is not a number of MiB",
            ),
            ("expandable_segments_reserve:garbage", Version(2, 15), "expandable_segments_reserve:garbage is not a"),
            ("expandable_segments_reserve:-1", Version(2, 15), "expandable_segments_reserve:-1 is not a"),
            ("expandable_segments_reserve:0.5", Version(2, 13), "PyTorch 2.13 has no option"),
            ("release_lock_on_cudamalloc:maybe", Version(2, 6), "release_lock_on_cudamalloc:maybe is not True or"),
            ("graph_capture_record_stream_reuse:7", Version(2, 9), "graph_capture_record_stream_reuse:7 is not True"),
            (
                "expandable_segments_reserve_by_class:[a]",
                Version(2, 15),
                "expandable_segments_reserve_by_class:[a] is not",
            ),
            ("pinned_colour:red", Version(2, 15), "PyTorch 2.15 has no option \"pinned_colour\""),
            ("max_split_size_mb:\u{1b}[31m", Version(2, 6), "max_split_size_mb:\\u{1b}[31m is not a number"),
            ("colour:red", Version(2, 6), "PyTorch 2.6 has no option \"colour\""),
            ("backend:cudaMallocAsync", Version(2, 6), "backend:cudaMallocAsync is not native"),
        ] {
            let error = parse(text, version).unwrap_err();
            assert!(error.starts_with(expected), "{text:?} gives {error:?}");
        }
        assert!(parse("max_split_size_mb:20", Version(2, 9)).is_ok());
        for text in [
            "expandable_segments_reserve_by_class:[a:0.5, b:8G]",
            "pinned_free_catch_all:True",
            "release_lock_on_cudamalloc:True",
        ] {
            assert_eq!(parse(text, Version::NEWEST), Ok(Conf::of(Version::NEWEST)), "{text}");
        }
        for (text, reserve) in [("0.5", Reserve::Share(0.5)), ("16G", Reserve::Bytes(16 << 30))] {
            let conf = parse(&format!("expandable_segments_reserve:{text}"), Version::NEWEST).unwrap();
            assert_eq!(conf.reserve, reserve);
        }
    }

    #[test]
    fn what_a_version_does_not_know_is_left_out_and_named() {
        let text = "max_split_size_mb:64,colour:red,roundup_power2_divisions:3,large_segment_size_mb:32";
        let (conf, refused) = Conf::of(Version(2, 11)).and_what_it_knows(text);
        assert_eq!((conf.max_split, conf.large_segment, conf.divisions), (64 << 20, 32 << 20, [0; 16]));
        let refused: Vec<String> = refused.iter().map(ConfError::to_string).collect();
        assert_eq!(refused.len(), 2);
        assert!(refused[0].contains("colour") && refused[1].contains("roundup_power2_divisions:3"), "{refused:?}");
    }

    #[test]
    fn versions_are_read() {
        assert_eq!("2.6".parse(), Ok(Version(2, 6)));
        for text in ["2.13.1", "2.13.0+cu124", "2.13.0a0+git1234567", "2.13.0.dev20260101"] {
            assert_eq!(text.parse(), Ok(Version(2, 13)), "{text}");
        }
        for text in ["", "2", "x.6", "2.6.x"] {
            assert!(matches!(text.parse::<Version>(), Err(ConfError::Version { .. })), "{text}");
        }
        let error = "9.9".parse::<Version>().unwrap_err().to_string();
        assert_eq!(error, "the rules of PyTorch 9.9 are not known here; those from 2.1 to 2.15 are");
        assert!("1.13".parse::<Version>().is_err() && "2.15".parse::<Version>().is_ok());
    }
}
