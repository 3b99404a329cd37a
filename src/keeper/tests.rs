//! A keeper and a daemon that talk, and daemons that follow one another.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use super::process::{Keeping, serve};
use super::*;
use crate::clock::{Clock as _, SystemClock};
use crate::wire::fd_channel::FdChannel;

const PATIENCE: Duration = Duration::from_secs(10);

/// A keeper in a thread of this process.
struct Running {
    dir: tempfile::TempDir,
    thread: std::thread::JoinHandle<Result<(), KeeperError>>,
}

fn start(alone_max: Option<Duration>) -> Running {
    let dir = tempfile::tempdir().unwrap();
    // One that ends was started by a daemon, which has gone at once.
    let daemon = alone_max.map(|_| FdChannel::pair().unwrap().0.into_socket());
    let keeping = Keeping { state_dir: dir.path().to_owned(), daemon, alone_max };
    let thread = std::thread::spawn(move || serve(keeping));
    Running { dir, thread }
}

impl Running {
    /// One that is to stay, and that nobody can find any more.
    fn remove_all(self) {
        drop(self.dir);
        let error = self.thread.join().unwrap().unwrap_err();
        assert!(matches!(error, KeeperError::System { .. }), "{error}");
    }

    fn connect(&self) -> Link {
        let since = SystemClock::new();
        loop {
            if let Some(link) = Link::connect(self.dir.path(), PATIENCE).unwrap() {
                return link;
            }
            assert!(since.now() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn file(number: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&fd, &number.to_le_bytes(), 0).unwrap();
    fd
}

fn number_in(fd: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::pread(fd, &mut bytes, 0).unwrap();
    u64::from_le_bytes(bytes)
}

fn keep(link: &Link, keys: &[Key]) {
    let files: Vec<(Key, OwnedFd)> = keys.iter().map(|key| (*key, file(key.message().number))).collect();
    let fds: Vec<_> = files.iter().map(|(key, fd)| (*key, fd.as_fd())).collect();
    link.keep(&fds).unwrap();
}

fn held(link: &Link) -> Vec<Key> {
    let held = link.list().unwrap();
    assert!(held.iter().all(|(key, fd)| number_in(fd) == key.message().number), "each under its own key");
    held.into_iter().map(|(key, _)| key).collect()
}

#[test]
fn what_was_sent_is_held_although_its_daemon_has_gone_at_once() {
    let running = start(Some(PATIENCE));
    let chunks: Vec<Key> = (1..=1_000).map(|chunk| Key::Chunk(ChunkId(chunk))).collect();
    let others = [Key::Process(SessionId(7)), Key::Node(3), Key::Witness, Key::Other(99, 5)];
    let first = running.connect();
    keep(&first, &chunks);
    first.let_go(&chunks[..200]).unwrap();
    // What is said without waiting, too, and what comes behind it.
    first.say_let_go(&chunks[200..400]).unwrap();
    keep(&first, &others);
    // Nothing was answered, and nobody is there any more.
    drop(first);
    let second = running.connect();
    let expected: Vec<Key> = chunks[400..].iter().copied().chain(others).collect();
    assert_eq!(held(&second), expected);
    // A copy: it holds them still.
    assert_eq!(held(&second), expected);
    second.end().unwrap();
    running.thread.join().unwrap().unwrap();
    assert!(!running.dir.path().join(SOCKET_NAME).exists());
}

#[test]
fn what_is_let_go_of_is_closed_when_the_daemon_hears_of_it() {
    let running = start(Some(PATIENCE));
    let link = running.connect();
    for number in 1..=200 {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let key = Key::Chunk(ChunkId(number));
        link.keep(&[(key, write.as_fd())]).unwrap();
        drop(write);
        link.let_go(&[key]).unwrap();
        // With every copy of the writing end closed, the reading end is at its end.
        rustix::io::ioctl_fionbio(&read, true).unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0_u8; 8]), Ok(0));
    }
    link.end().unwrap();
    running.thread.join().unwrap().unwrap();
}

#[test]
fn a_second_daemon_takes_the_place_of_the_first() {
    let running = start(Some(PATIENCE));
    let first = running.connect();
    keep(&first, &[Key::Chunk(ChunkId(1))]);
    let second = running.connect();
    assert_eq!(held(&second), [Key::Chunk(ChunkId(1))]);
    let since = SystemClock::new();
    while !first.is_gone() {
        assert!(since.now() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    second.end().unwrap();
    running.thread.join().unwrap().unwrap();
}

#[test]
fn one_that_nobody_needs_ends_and_one_that_holds_a_process_that_lives_does_not() {
    let running = start(Some(Duration::from_millis(10)));
    let link = running.connect();
    let me = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).unwrap();
    link.keep(&[(Key::Process(SessionId(1)), me.as_fd())]).unwrap();
    drop(link);
    std::thread::sleep(Duration::from_millis(2_500));
    assert!(!running.thread.is_finished(), "somebody may come back");
    let link = running.connect();
    link.let_go(&[Key::Process(SessionId(1))]).unwrap();
    drop(link);
    running.thread.join().unwrap().unwrap();
}

#[test]
fn one_that_somebody_else_has_started_is_emptied_and_stays() {
    let running = start(None);
    let link = running.connect();
    keep(&link, &[Key::Chunk(ChunkId(1))]);
    link.end().unwrap();
    let link = running.connect();
    assert_eq!(held(&link), []);
    drop(link);
    running.remove_all();
}

#[test]
fn one_whose_socket_is_gone_ends_for_nobody_can_find_it() {
    let running = start(Some(PATIENCE));
    drop(running.connect());
    std::fs::remove_file(running.dir.path().join(SOCKET_NAME)).unwrap();
    running.thread.join().unwrap().unwrap();
}

#[test]
fn one_that_is_to_stay_and_whose_socket_is_gone_is_found_again_with_what_it_holds() {
    let running = start(None);
    let link = running.connect();
    keep(&link, &[Key::Chunk(ChunkId(1))]);
    drop(link);
    // A daemon has been there.
    std::fs::write(running.dir.path().join(JOURNAL_NAME), "").unwrap();
    std::fs::remove_file(running.dir.path().join(SOCKET_NAME)).unwrap();
    let link = running.connect();
    assert_eq!(held(&link), [Key::Chunk(ChunkId(1))]);
    assert!(link.stays());
    drop(link);
    running.remove_all();
}

#[test]
fn one_that_a_daemon_has_started_and_whose_socket_is_gone_is_found_again_as_long_as_a_journal_wants_it() {
    let running = start(Some(PATIENCE));
    let journal = running.dir.path().join(JOURNAL_NAME);
    std::fs::write(&journal, "").unwrap();
    let link = running.connect();
    keep(&link, &[Key::Chunk(ChunkId(1))]);
    drop(link);
    std::fs::remove_file(running.dir.path().join(SOCKET_NAME)).unwrap();
    let link = running.connect();
    assert_eq!(held(&link), [Key::Chunk(ChunkId(1))]);
    drop(link);
    // A daemon has ended since, and wants nothing of it.
    std::fs::remove_file(journal).unwrap();
    std::fs::remove_file(running.dir.path().join(SOCKET_NAME)).unwrap();
    let link = running.connect();
    assert_eq!(held(&link), []);
    drop(link);
    std::fs::remove_file(running.dir.path().join(SOCKET_NAME)).unwrap();
    running.thread.join().unwrap().unwrap();
}

#[test]
fn what_it_does_not_understand_ends_the_connection_and_loses_nothing() {
    let running = start(Some(PATIENCE));
    let link = running.connect();
    keep(&link, &[Key::Chunk(ChunkId(1))]);
    drop(link);
    let path = running.dir.path().join(SOCKET_NAME);
    let (null, _) = FdChannel::pair().unwrap();
    let null = null.into_socket();
    let says: [(&[u8], usize, &str); 4] = [
        // Bytes that are no message, a message of a kind that it does not know, a key without a descriptor, another version.
        (&[0xff; 9], 0, ""),
        (&[0x7a, 0x00], 0, "does not know"),
        (&[0x12, 0x06, 0x0a, 0x04, 0x08, 0x01, 0x10, 0x05], 2, "2 descriptors came for 1 keys"),
        (&[0x0a, 0x02, 0x08, 0x09], 0, "it speaks version 1 and the daemon 9"),
    ];
    for (bytes, fds, expected) in says {
        let channel = FdChannel::connect(&path, PATIENCE).unwrap();
        let fds: Vec<_> = (0..fds).map(|_| null.as_fd()).collect();
        channel.send_bytes(bytes, &fds).unwrap();
        if !expected.is_empty() {
            let Some(v1::From::Refused(text)) = channel.receive::<v1::FromKeeper>().unwrap().0.what else {
                panic!("{expected}: it did not refuse")
            };
            assert!(text.contains(expected), "{text}");
        }
        assert_eq!(channel.receive::<v1::FromKeeper>().unwrap_err(), ChannelError::Closed);
    }
    let link = running.connect();
    assert_eq!(held(&link), [Key::Chunk(ChunkId(1))]);
    link.end().unwrap();
    running.thread.join().unwrap().unwrap();
}

#[test]
fn one_that_is_of_no_use_is_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = std::process::Command::new("sh");
    program.args(["-c", "exec sleep 60"]);
    let since = SystemClock::new();
    let error = Link::start(program, dir.path()).unwrap_err();
    assert!(matches!(error, KeeperError::Channel(ChannelError::TimedOut)), "{error}");
    assert!(since.now() < PATIENCE, "it was ended, and nobody waited for it");
}
