//! The daemon's configuration file.

use std::cell::RefCell;
use std::io::{Seek as _, Write as _};

use stitchd::daemon::config::{Config, Flags};
use stitchd::units::Bytes;
use tempfile::NamedTempFile;

/// More pretended devices than this no machine has.
const DEVICES_MAX: usize = 1024;

thread_local! {
    /// One file for all inputs: the reader takes a path.
    static FILE: RefCell<NamedTempFile> = RefCell::new(NamedTempFile::new().expect("there is room for a small file"));
}

pub(crate) fn read(bytes: &[u8]) {
    let Some(config) = load(bytes, &Flags::default()) else { return };
    let totals = config.pretended_totals();
    assert!(totals.len() <= DEVICES_MAX, "{} devices", totals.len());
    assert!(totals.iter().all(|total| *total >= Bytes::mib(2)));
    let printed = config.to_toml();
    let again = load(printed.as_bytes(), &Flags::default()).unwrap_or_else(|| panic!("does not read back: {printed}"));
    // Where plans are is spelt out by then.
    assert_eq!(Config { plans: again.plans.clone(), ..config }, again);
}

fn load(bytes: &[u8], flags: &Flags) -> Option<Config> {
    FILE.with_borrow_mut(|file| {
        let written = file.rewind().and_then(|()| file.as_file().set_len(0)).and_then(|()| file.write_all(bytes));
        written.expect("there is room for a small file");
        Config::load(Some(file.path()), flags).ok()
    })
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let all = "driver = 'host'\nruntime_dir = '/run/x'\nhttp = '127.0.0.1:9464'\nladder = ['2MiB', '32MiB']\n\
        session_limit = '3GiB'\nwarm = '1GiB'\npriority_max = 7\ndrain = '2s'\nsocket_mode = '660'\nplans = '/p'\n\
        [[device]]\nordinal = 0\nbytes = '16GiB'\n[[device]]\nordinal = 3\n";
    let edges = [
        "drain = '18446744073709551615m'",
        "drain = '307445734561825860m'",
        "drain = '18446744073709551615s'",
        "[[device]]\nordinal = 4294967295",
        "ladder = ['2097152', '4096MiB']",
        "warm = '4611686018427387904'",
        "http = '[::1]:0'",
        "socket_mode = '+7'",
        "",
        "\u{feff}driver = \"sim\"",
    ];
    std::iter::once(all).chain(edges).map(|text| text.as_bytes().to_vec()).collect()
}
