//! What `machine.conf` says: the table in the crate's header.

use crate::code;

/// Known misbehaviours of real libraries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quirk {
    /// Unmapping several mappings with one call makes freeing their addresses fail (ROCR issue 285).
    UnmapRunBreaksFree,
    /// Setting the access of several mappings with one call fails (ROCm issues 2516, 2667).
    AccessRunFails,
    /// Setting access adds up sizes from the first mapping of the reservation, wherever the span begins, and fails unless some of them sum exactly
    /// to its length (ROCm issues 2516, 2667, as their fixes tell it).
    AccessSumsFromFirst,
    /// The alignment of a reservation is ignored (HIP of 2024).
    IgnoresAlignment,
    /// A map that fails says that it is done, and unmapping what is not mapped ends the process (HIP of 2024).
    MapLies,
    /// Where no descriptor is left for a handle memory is said to have run out (ROCm 7.14, rocm-systems issue 10604). That a handle holds one is so here without it.
    FdPerHandle,
    /// What was mapped keeps its memory until the addresses where it was are given back, whatever is unmapped and released (ROCm before rocm-systems pull 4363).
    MemoryStaysWithAddresses,
}

impl Quirk {
    const ALL: [(&'static str, Quirk); 7] = [
        ("unmap_run_breaks_free", Quirk::UnmapRunBreaksFree),
        ("access_run_fails", Quirk::AccessRunFails),
        ("access_sums_from_first", Quirk::AccessSumsFromFirst),
        ("ignores_alignment", Quirk::IgnoresAlignment),
        ("map_lies", Quirk::MapLies),
        ("fd_per_handle", Quirk::FdPerHandle),
        ("memory_stays_with_addresses", Quirk::MemoryStaysWithAddresses),
    ];
}

/// Which devices reach others' memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Peers {
    All,
    /// The first of each reaches the memory of the second.
    Pairs(Vec<(usize, usize)>),
}

impl Peers {
    fn of(text: &str) -> Peers {
        let ordinal = |text: &str| text.trim().parse().expect("machine.conf: an ordinal");
        let pair = |pair: &str| match pair.split_once('>') {
            Some((one, other)) => vec![(ordinal(one), ordinal(other))],
            None => {
                let (one, other) = pair.split_once('-').expect("machine.conf: a pair of devices");
                vec![(ordinal(one), ordinal(other)), (ordinal(other), ordinal(one))]
            }
        };
        match text {
            "all" => Peers::All,
            "none" => Peers::Pairs(Vec::new()),
            pairs => Peers::Pairs(pairs.split(',').flat_map(pair).collect()),
        }
    }

    /// Whether one device reaches the memory of another; each reaches its own.
    pub(crate) fn reach(&self, one: usize, other: usize) -> bool {
        one == other
            || match self {
                Peers::All => true,
                Peers::Pairs(pairs) => pairs.contains(&(one, other)),
            }
    }
}

/// What collectives do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Collectives {
    Work,
    /// They fail, whatever the memory: the machine lacks something.
    Broken,
    /// They say that they are done, and have done nothing.
    Nothing,
    /// Ranges of several chunks are refused, as by a version that does not take such memory.
    Refused,
    /// Ranges of several chunks end the process.
    Ends,
    /// What lies behind the first chunk is left as it was.
    FirstChunk,
    /// Only the first chunk is known: it is read again in the place of those that follow.
    FirstChunkAgain,
}

impl Collectives {
    fn of(text: &str) -> Collectives {
        match text {
            "work" => Collectives::Work,
            "broken" => Collectives::Broken,
            "nothing" => Collectives::Nothing,
            "refused" => Collectives::Refused,
            "ends" => Collectives::Ends,
            "first_chunk" => Collectives::FirstChunk,
            "first_chunk_again" => Collectives::FirstChunkAgain,
            _ => panic!("machine.conf: what collectives do"),
        }
    }
}

/// Which call fails.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Fail {
    /// The how-manieth; 0 for none.
    nth: u64,
    /// Of which name; of all where there is none.
    call: Option<String>,
    /// In which process; in each where there is none.
    pid: Option<u32>,
}

impl Fail {
    fn of(text: &str) -> Fail {
        let mut words = text.split_whitespace();
        Fail {
            nth: words.next().and_then(|nth| nth.parse().ok()).expect("machine.conf: a number"),
            call: words.next().map(str::to_owned),
            pid: words.next().map(|pid| pid.parse().expect("machine.conf: a process")),
        }
    }

    /// This call is the one: the `nth` of this process, and the `nth_of_name` that is called so.
    pub(crate) fn is_due(&self, call: &str, nth: u64, nth_of_name: u64) -> bool {
        let counted = match &self.call {
            None => nth,
            Some(of) if of == call => nth_of_name,
            Some(_) => return false,
        };
        counted == self.nth && self.pid.is_none_or(|pid| pid == std::process::id())
    }
}

/// The keys with their values.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    pub(crate) devices: Vec<u64>,
    /// Of each device; the last stands for those that follow.
    granularity: Vec<u64>,
    pub(crate) version: i32,
    pub(crate) latency_us: u64,
    pub(crate) fail: Fail,
    pub(crate) fail_code: i32,
    pub(crate) hang_after: u64,
    pub(crate) context_bytes: u64,
    pub(crate) mappings: usize,
    pub(crate) export_slots: usize,
    pub(crate) dirty: bool,
    pub(crate) peers: Peers,
    pub(crate) rdma: bool,
    pub(crate) fabric: bool,
    pub(crate) imex: bool,
    pub(crate) mps: bool,
    pub(crate) volta: bool,
    pub(crate) mig: bool,
    pub(crate) nvml: bool,
    pub(crate) one_uuid: bool,
    pub(crate) locked_bytes: u64,
    pub(crate) collectives: Collectives,
    pub(crate) quirks: Vec<Quirk>,
}

impl Conf {
    /// What the text says; `version` is the library's where it says none.
    pub(crate) fn of(text: &str, version: i32) -> Conf {
        let mut conf = Conf {
            devices: vec![1 << 30],
            granularity: vec![2 << 20],
            version,
            latency_us: 0,
            fail: Fail::default(),
            fail_code: code::UNKNOWN,
            hang_after: 0,
            context_bytes: 0,
            mappings: 30_000,
            export_slots: 0,
            dirty: false,
            peers: Peers::All,
            rdma: false,
            fabric: false,
            imex: true,
            mps: false,
            volta: false,
            mig: false,
            nvml: true,
            one_uuid: false,
            locked_bytes: u64::MAX,
            collectives: Collectives::Work,
            quirks: Vec::new(),
        };
        for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
            conf.set(key.trim(), value.trim());
        }
        conf
    }

    /// The size of which every chunk of a device is a multiple, and every address of one.
    pub(crate) fn granularity_of(&self, device: usize) -> u64 {
        self.granularity.get(device).or(self.granularity.last()).copied().expect("machine.conf: a granularity")
    }

    /// The smallest of all devices': addresses are taken in multiples of it.
    pub(crate) fn granularity_min(&self) -> u64 {
        self.granularity.iter().copied().min().expect("machine.conf: a granularity")
    }

    fn set(&mut self, key: &str, value: &str) {
        let number = || value.parse::<u64>().expect("machine.conf: a number");
        let list = || value.split(',').map(str::trim).filter(|word| !word.is_empty());
        let sizes = || list().map(|bytes| bytes.parse().expect("machine.conf: bytes")).collect();
        let quirk = |word: &str| Quirk::ALL.iter().find(|(name, _)| *name == word).expect("machine.conf: a quirk").1;
        match key {
            "devices" => self.devices = sizes(),
            "granularity" => self.granularity = sizes(),
            "version" => self.version = number() as i32,
            "latency_us" => self.latency_us = number(),
            "fail" => self.fail = Fail::of(value),
            "fail_code" => self.fail_code = number() as i32,
            "hang_after" => self.hang_after = number(),
            "context_bytes" => self.context_bytes = number(),
            "mappings" => self.mappings = number() as usize,
            "export_slots" => self.export_slots = number() as usize,
            "dirty" => self.dirty = number() != 0,
            "peers" => self.peers = Peers::of(value),
            "rdma" => self.rdma = number() != 0,
            "fabric" => self.fabric = number() != 0,
            "imex" => self.imex = number() != 0,
            "mps" => self.mps = number() != 0,
            "volta" => self.volta = number() != 0,
            "nvml" => self.nvml = number() != 0,
            "one_uuid" => self.one_uuid = number() != 0,
            "locked_bytes" => self.locked_bytes = number(),
            "collectives" => self.collectives = Collectives::of(value),
            "mig" => self.mig = number() != 0,
            "quirks" => self.quirks = list().map(quirk).collect(),
            _ => panic!("machine.conf: there is no key {key}"),
        }
    }
}
