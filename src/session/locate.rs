//! Where the daemon is, where a recording goes, and which process of its job this is: the one place of the client that reads the environment.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::driver::LibraryPlace;
use crate::limits;
use crate::plan::Position;
use crate::units::{Bytes, parse_time};
use crate::wire::v1;

/// The name of the gRPC socket in a runtime directory.
pub const SOCKET_NAME: &str = "stitchd.sock";
/// The runtime directory when nobody names another.
pub const RUNTIME_DIR: &str = "/run/stitchd";

/// What `STITCHD_PLAN` is where plans are made while the job runs.
pub const AUTO: &str = "auto";
/// What it is where a job does without.
pub const NO_PLAN: &str = "none";

/// Whether this names a plan file or a directory of them, as the value of `STITCHD_PLAN` or of `--plan`.
pub fn is_plan_file(plan: &OsStr) -> bool {
    plan != AUTO && plan != NO_PLAN
}

/// What sd_listen_fds(3) says: names for as many descriptors as there are, if they are for this process.
fn passed_names(read: &impl Fn(&'static str) -> Option<OsString>) -> Vec<String> {
    let number = |name| read(name)?.to_str()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Vec::new();
    }
    let names = read("LISTEN_FDNAMES").unwrap_or_default().to_string_lossy().into_owned();
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    // Where both do not fit nothing is known of either.
    if number("LISTEN_FDS").map(|count| count as usize) == Some(names.len()) { names } else { Vec::new() }
}

/// What sd_watchdog_enabled(3) says.
fn watchdog(read: &impl Fn(&'static str) -> Option<OsString>) -> Option<std::time::Duration> {
    let number = |name| read(name)?.to_str()?.parse::<u64>().ok();
    let is_ours = read("WATCHDOG_PID").is_none() || number("WATCHDOG_PID") == Some(std::process::id().into());
    number("WATCHDOG_USEC").filter(|_| is_ours).map(std::time::Duration::from_micros)
}

/// What a process does that finds no daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WithoutDaemon {
    /// Requests fail, and say why.
    Refuse,
    /// It is its own daemon: [`super::PrivateProcess`].
    Private,
}

/// What the environment says, as far as the client cares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `STITCHD_SOCKET`: the socket itself.
    pub socket: Option<OsString>,
    /// `NVIDIA_DRA_LOCAL_IPC_DIR`: set by Kubernetes where containers share a claim.
    pub dra_directory: Option<OsString>,
    /// `STITCHD_RUNTIME_DIR`: the directory of the socket.
    pub runtime_dir: Option<OsString>,
    /// `STITCHD_PLAN`: a plan file to serve from, a directory with one for each process
    /// ([`crate::plan::directory`]), `auto` for plans that are made while the job runs, or `none`.
    pub plan: Option<OsString>,
    /// `STITCHD_RECORD`: where what the process does is recorded; [`recording_path`] says in which file.
    pub record: Option<OsString>,
    /// `STITCHD_RECORD_LIMIT`: at how many bytes of a file the recording stops. One that has a limit is made by the way: where its file cannot be made the job goes on without.
    pub record_limit: Option<OsString>,
    /// `STITCHD_LIBRARY`: the client library that Python programs are to load.
    pub client_library: Option<OsString>,
    /// `PYTHONPATH`: where Python programs look for packages.
    pub python_path: Option<OsString>,
    /// `RANK`, as launchers of jobs of several processes set it: which of them this is.
    pub rank: Option<OsString>,
    /// `WORLD_SIZE`: of how many.
    pub world_size: Option<OsString>,
    /// `STITCHD_WITHOUT_DAEMON`: what a process does that finds no daemon, `refuse` or `private`.
    pub without_daemon: Option<OsString>,
    /// `STITCHD_TENANT`: whose memory it is, of the tenants of the daemon's configuration that this process may be.
    pub tenant: Option<OsString>,
    /// `STITCHD_POD_UID`, and `STITCHD_POD_NAMESPACE`, `STITCHD_POD_NAME`, `STITCHD_CONTAINER_NAME`: where Kubernetes runs this process, as its manifest has the container told.
    pub pod: [Option<OsString>; 4],
    /// `STITCHD_LIMIT`: bytes that this process may never pass, all devices together.
    pub limit: Option<OsString>,
    /// `STITCHD_PRIORITY`: its place among others; higher is served first.
    pub priority: Option<OsString>,
    /// `STITCHD_GUARANTEE`: bytes of each device that it uses which it is to be guaranteed.
    pub guarantee: Option<OsString>,
    /// `STITCHD_ADMIT`: how long each iteration waits, before it begins, until what it needs at its peak is guaranteed.
    pub admit: Option<OsString>,
    /// `STITCHD_DRIVER`: whose devices a process without a daemon uses; a daemon says itself.
    pub driver: Option<OsString>,
    /// `STITCHD_DRIVER_LIBRARY`, read in tests only: the library that stands for the vendor's.
    pub library: LibraryPlace,
    /// `NOTIFY_SOCKET`: where a service manager listens to what it has started.
    pub notify_socket: Option<OsString>,
    /// `LISTEN_FDNAMES`, where `LISTEN_PID` is this process: what a service manager passes to it, from descriptor 3 on.
    pub passed_names: Vec<String>,
    /// `WATCHDOG_USEC`, where `WATCHDOG_PID` is this process or is not there: how often a service manager wants to hear that it is well.
    pub watchdog: Option<std::time::Duration>,
    /// `STITCHD_TEST_DIE_AT`, read in tests only: `daemon:12:FILE` has a daemon killed at its twelfth moment, unless the file is there ([`crate::mortal`]).
    #[cfg(feature = "testing")]
    pub die_at: Option<OsString>,
}

impl Environment {
    /// Reads it.
    #[expect(clippy::disallowed_methods, reason = "this is the place of the client that reads the environment")]
    pub fn read() -> Environment {
        let read = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Environment {
            socket: read("STITCHD_SOCKET"),
            dra_directory: read("NVIDIA_DRA_LOCAL_IPC_DIR"),
            runtime_dir: read("STITCHD_RUNTIME_DIR"),
            plan: read("STITCHD_PLAN"),
            record: read("STITCHD_RECORD"),
            record_limit: read("STITCHD_RECORD_LIMIT"),
            client_library: read("STITCHD_LIBRARY"),
            python_path: read("PYTHONPATH"),
            rank: read("RANK"),
            world_size: read("WORLD_SIZE"),
            without_daemon: read("STITCHD_WITHOUT_DAEMON"),
            tenant: read("STITCHD_TENANT"),
            pod: ["STITCHD_POD_UID", "STITCHD_POD_NAMESPACE", "STITCHD_POD_NAME", "STITCHD_CONTAINER_NAME"].map(read),
            limit: read("STITCHD_LIMIT"),
            priority: read("STITCHD_PRIORITY"),
            guarantee: read("STITCHD_GUARANTEE"),
            admit: read("STITCHD_ADMIT"),
            driver: read("STITCHD_DRIVER"),
            #[cfg(feature = "testing")]
            library: read("STITCHD_DRIVER_LIBRARY").map(LibraryPlace::at).unwrap_or_default(),
            #[cfg(not(feature = "testing"))]
            library: LibraryPlace::default(),
            notify_socket: read("NOTIFY_SOCKET"),
            passed_names: passed_names(&read),
            watchdog: watchdog(&read),
            #[cfg(feature = "testing")]
            die_at: read("STITCHD_TEST_DIE_AT"),
        }
    }

    /// Has this process, which is `whose`, killed where a test wants that.
    pub fn be_mortal(&self, whose: &str) {
        #[cfg(feature = "testing")]
        if let Some(wish) = self.die_at.as_ref().and_then(|wish| wish.to_str()) {
            let mut parts = wish.splitn(3, ':');
            let is_ours = parts.next() == Some(whose);
            if let (true, Some(Ok(number)), Some(died)) = (is_ours, parts.next().map(str::parse), parts.next()) {
                crate::mortal::die_at(number, died.into());
            }
        }
        #[cfg(not(feature = "testing"))]
        let _ = whose;
    }

    /// Whose memory it is; empty for what the daemon takes this process for.
    pub fn tenant(&self) -> String {
        self.tenant.as_ref().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Where this process runs, as Kubernetes calls it; nothing without the UID of a pod, by which the daemon sees whether it is so.
    pub fn pod(&self) -> Option<v1::Pod> {
        let said = |at: usize| self.pod[at].as_ref().map(|text| text.to_string_lossy().into_owned());
        // What is longer is no name of Kubernetes, and nothing to fail for.
        let text = |at: usize| said(at).filter(|text| text.len() <= limits::POD_NAME_LEN_MAX).unwrap_or_default();
        let uid = text(0);
        (!uid.is_empty()).then(|| v1::Pod { uid, namespace: text(1), name: text(2), container: text(3) })
    }

    /// What this process asks the daemon for.
    ///
    /// # Errors
    ///
    /// What is no size, number or time, by the name of its variable.
    pub fn terms(&self) -> Result<Terms, String> {
        let size = |text: &str| text.parse::<Bytes>().map_err(|error| error.to_string());
        let number = |text: &str| text.parse().map_err(|_| format!("'{text}' is no number from 0 on"));
        Ok(Terms {
            limit: said("STITCHD_LIMIT", &self.limit, |text| size(text).and_then(as_limit))?,
            priority: said("STITCHD_PRIORITY", &self.priority, number)?.unwrap_or(0),
            guarantee: said("STITCHD_GUARANTEE", &self.guarantee, size)?,
            admit: said("STITCHD_ADMIT", &self.admit, parse_time)?,
        })
    }

    /// What to do without a daemon. Unless told otherwise a process refuses: alone it would take memory that others were promised.
    pub fn without_daemon(&self) -> Result<WithoutDaemon, String> {
        match self.without_daemon.as_ref().map(|word| word.to_string_lossy()).as_deref() {
            None | Some("refuse") => Ok(WithoutDaemon::Refuse),
            Some("private") => Ok(WithoutDaemon::Private),
            Some(other) => {
                let shown = crate::error::excerpt(other, 40);
                Err(format!("STITCHD_WITHOUT_DAEMON is '{shown}', and can be refuse or private"))
            }
        }
    }

    /// The most bytes that a recording's file has: what is said, if it is a number and less than the usual.
    pub fn record_len_max(&self) -> u64 {
        let said = self.record_limit.as_ref().and_then(|text| text.to_str()?.parse::<u64>().ok());
        said.map_or(limits::RECORD_FILE_LEN_MAX, |said| said.min(limits::RECORD_FILE_LEN_MAX))
    }

    /// Plans are made while the job runs.
    pub fn plans_itself(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan == AUTO)
    }

    /// The plan file to serve from.
    pub fn plan_file(&self) -> Option<&Path> {
        self.plan.as_ref().filter(|plan| is_plan_file(plan)).map(Path::new)
    }

    /// The daemon's gRPC socket.
    pub fn socket(&self) -> PathBuf {
        if let Some(socket) = &self.socket {
            return PathBuf::from(socket);
        }
        let directory = self.dra_directory.as_ref().or(self.runtime_dir.as_ref());
        directory.map_or_else(|| PathBuf::from(RUNTIME_DIR), PathBuf::from).join(SOCKET_NAME)
    }

    /// Which process of its job this is. Nothing where the launcher does not say both numbers, or says what cannot be: other programs use these names, too.
    pub fn position(&self) -> Option<Position> {
        let number = |text: &Option<OsString>| text.as_ref()?.to_str()?.parse::<u32>().ok();
        Position::new(number(&self.rank)?, number(&self.world_size)?)
    }
}

/// What a process asks the daemon for; see [`Environment`] for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Terms {
    /// Of the session; nothing for the daemon's default.
    pub limit: Option<Bytes>,
    /// Of the session.
    pub priority: u32,
    /// Of each device that it uses; nothing for what its tenant has.
    pub guarantee: Option<Bytes>,
    /// How long an iteration waits for its peak; nothing where it asks for none.
    pub admit: Option<Duration>,
}

/// A limit that a process can live with.
///
/// # Errors
///
/// It is less than one chunk.
pub fn as_limit(bytes: Bytes) -> Result<Bytes, String> {
    let least = limits::CHUNK_LEN_MIN;
    if bytes < least { Err(format!("{bytes} are less than one chunk, {least}")) } else { Ok(bytes) }
}

/// What a variable says, if it is there.
fn said<T>(
    name: &str,
    text: &Option<OsString>,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    let Some(text) = text else { return Ok(None) };
    let text = text.to_string_lossy();
    let text = crate::error::excerpt(&text, 40);
    read(&text).map(Some).map_err(|error| format!("{name}: {error}"))
}

/// The file of one process and device: `{pid}` and `{device}` in `name` are replaced, and what of the two is not there is put before the extension. So no two of them ever write the same file.
pub fn recording_path(name: &OsStr, pid: u32, device: u32) -> PathBuf {
    let mut bytes = name.as_bytes().to_vec();
    let mut rest = String::new();
    for (place, number) in [("{pid}", pid), ("{device}", device)] {
        match replace(&bytes, place.as_bytes(), number.to_string().as_bytes()) {
            Some(replaced) => bytes = replaced,
            None => rest.push_str(&format!(".{number}")),
        }
    }
    let path = PathBuf::from(OsString::from_vec(bytes));
    if rest.is_empty() { path } else { before_extension(&path, &rest) }
}

/// Every place of `what` filled; `None` where there is none.
fn replace(bytes: &[u8], what: &[u8], by: &[u8]) -> Option<Vec<u8>> {
    let mut replaced = Vec::new();
    let (mut at, mut is_there) = (0, false);
    while let Some(byte) = bytes.get(at) {
        if bytes.get(at..).is_some_and(|rest| rest.starts_with(what)) {
            replaced.extend_from_slice(by);
            at += what.len();
            is_there = true;
        } else {
            replaced.push(*byte);
            at += 1;
        }
    }
    is_there.then_some(replaced)
}

fn before_extension(path: &Path, words: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(words);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_processes_or_devices_record_into_one_file() {
        for (name, expected) in [
            ("run.stitchtrace", "run.71.2.stitchtrace"),
            ("/tmp/a.b/run", "/tmp/a.b/run.71.2"),
            ("/tmp/{pid}/run-{device}.stitchtrace", "/tmp/71/run-2.stitchtrace"),
            ("run-{pid}.stitchtrace", "run-71.2.stitchtrace"),
            ("{device}{device}.t", "22.71.t"),
            (".hidden", ".hidden.71.2"),
            ("{pid", "{pid.71.2"),
        ] {
            assert_eq!(recording_path(OsStr::new(name), 71, 2), PathBuf::from(expected), "{name}");
        }
        let odd = OsStr::from_bytes(b"r\xff.t");
        assert_eq!(recording_path(odd, 1, 0).as_os_str().as_bytes(), b"r\xff.1.0.t");
    }

    #[test]
    fn what_a_process_asks_for_is_a_size_a_number_and_a_time() {
        let environment = Environment::default();
        assert_eq!(environment.terms(), Ok(Terms::default()));
        let said = |text: &str| Some(OsString::from(text));
        let environment = Environment {
            limit: said("20GiB"),
            priority: said("3"),
            guarantee: said("512MiB"),
            admit: said("90s"),
            ..environment
        };
        let (limit, guarantee) = (Some(Bytes::gib(20)), Some(Bytes::mib(512)));
        let admit = Some(Duration::from_secs(90));
        assert_eq!(environment.terms(), Ok(Terms { limit, priority: 3, guarantee, admit }));
        let wrong = |environment: Environment| environment.terms().unwrap_err();
        let error = wrong(Environment { limit: said("much"), ..environment.clone() });
        assert!(error.starts_with("STITCHD_LIMIT: 'much' is not a size"), "{error}");
        let error = wrong(Environment { limit: said("0"), ..environment.clone() });
        assert_eq!(error, "STITCHD_LIMIT: 0 B are less than one chunk, 2.0 MiB");
        let error = wrong(Environment { priority: said("-1"), ..environment.clone() });
        assert_eq!(error, "STITCHD_PRIORITY: '-1' is no number from 0 on");
        let error = wrong(Environment { admit: said("soon"), ..environment });
        assert_eq!(error, "STITCHD_ADMIT: 'soon' is not a time such as 2s, 0.5s or 500ms");
    }

    #[test]
    fn a_process_goes_without_a_daemon_only_where_it_is_told_to() {
        let without = |word: Option<&str>| {
            Environment { without_daemon: word.map(OsString::from), ..Environment::default() }.without_daemon()
        };
        assert_eq!(without(None), Ok(WithoutDaemon::Refuse));
        assert_eq!(without(Some("refuse")), Ok(WithoutDaemon::Refuse));
        assert_eq!(without(Some("private")), Ok(WithoutDaemon::Private));
        assert!(without(Some("Private")).unwrap_err().contains("'Private', and can be refuse or private"));
    }

    #[test]
    fn the_more_particular_word_wins() {
        let mut environment = Environment::default();
        assert_eq!(environment.socket(), PathBuf::from("/run/stitchd/stitchd.sock"));
        environment.runtime_dir = Some("/tmp/run".into());
        assert_eq!(environment.socket(), PathBuf::from("/tmp/run/stitchd.sock"));
        environment.dra_directory = Some("/run/dra".into());
        assert_eq!(environment.socket(), PathBuf::from("/run/dra/stitchd.sock"));
        environment.socket = Some("/x/y".into());
        assert_eq!(environment.socket(), PathBuf::from("/x/y"));
    }
    #[test]
    fn a_process_knows_its_place_in_its_job_where_the_launcher_says_it() {
        let position = |rank: &str, world_size: &str| {
            let said = |text: &str| Some(OsString::from(text)).filter(|text| !text.is_empty());
            Environment { rank: said(rank), world_size: said(world_size), ..Environment::default() }.position()
        };
        assert_eq!(position("3", "8"), Position::new(3, 8));
        assert!(position("3", "8").is_some());
        for (rank, world_size) in [("", "8"), ("3", ""), ("8", "8"), ("-1", "8"), ("a", "8"), ("3", "9999999999")] {
            assert_eq!(position(rank, world_size), None, "{rank} of {world_size}");
        }
    }
}
