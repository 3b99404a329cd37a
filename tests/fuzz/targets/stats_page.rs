//! The page that a session is given and maps: any file, sealed or not.

use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use stitchd::ids::SessionId;
use stitchd::wire::stats_page::{self, COUNTED_MAX, COUNTERS_AT, LEN, StatsPageError};

/// The first byte says how the file is sealed, the rest is what is in it.
pub(crate) fn read(bytes: &[u8]) {
    let Some((seals, contents)) = bytes.split_first() else { return };
    let page = rustix::fs::memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let page = page.expect("there are descriptors");
    rustix::io::pwrite(&page, contents, 0).expect("there is memory");
    let mut wanted = SealFlags::empty();
    for (bit, seal) in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL].into_iter().enumerate() {
        if seals >> bit & 1 == 1 {
            wanted |= seal;
        }
    }
    rustix::fs::fcntl_add_seals(&page, wanted).expect("it can be sealed");
    let checked = stats_page::check(page.as_fd());
    let is_fixed = wanted.contains(SealFlags::SHRINK | SealFlags::GROW) && contents.len() == LEN;
    match checked {
        Ok(()) => assert!(is_fixed && header(&page)[..16] == header(&good())[..16]),
        Err(StatsPageError::Unsealed) => assert!(!is_fixed),
        Err(error) => assert!(is_fixed && header(&page)[..16] != header(&good())[..16], "{error:?}"),
    }
    // Whatever the file is: short, long, without a header.
    let sets = stats_page::read(&page).expect("it can be read");
    let at = |counter: usize| {
        let word = contents.get(COUNTERS_AT + 8 * counter..COUNTERS_AT + 8 * (counter + 1));
        word.map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
    };
    let counters = sets.iter().flat_map(|set| set.counters);
    // What nobody can have counted is 0.
    let read_as = |found: u64| if found <= COUNTED_MAX { found } else { 0 };
    assert!(counters.enumerate().all(|(number, counter)| at(number).is_none_or(|found| read_as(found) == counter)));
}

fn good() -> OwnedFd {
    stats_page::create(SessionId(1)).expect("there is memory")
}

fn header(page: &OwnedFd) -> [u8; COUNTERS_AT] {
    let mut header = [0; COUNTERS_AT];
    rustix::io::pread(page, &mut header, 0).expect("it can be read");
    header
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut page = vec![0; LEN];
    page[..COUNTERS_AT].copy_from_slice(&header(&good()));
    page[COUNTERS_AT] = 9;
    let sealed = |seals: u8, contents: &[u8]| [&[seals], contents].concat();
    vec![sealed(7, &page), sealed(3, &page), sealed(1, &page), sealed(7, &page[..100]), sealed(0, &[])]
}
