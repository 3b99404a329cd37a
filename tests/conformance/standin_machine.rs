//! What only the drivers for GPUs meet, on pretended machines: devices that go, tables that are full, libraries that hang or lie, parts of GPUs, other vendors' habits.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::process::{Resource, Rlimit};
use stitchd::driver::gpu::{GpuDriver, GpuKind};
use stitchd::driver::{Access, Cause, Driver, DriverError, Handle, Rank};
use stitchd::error::{ErrorKind, chain};
use stitchd::ids::{ChunkId, DeviceId, StreamId};
use stitchd::limits;
use stitchd::memory::{Chunk, Device, Mapping};
use stitchd::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

use crate::alone::{alone, forked};
use crate::stall::Stalls;
use crate::standin::Machine;
use crate::{DEVICES, conf, open};

const GRANULE: Bytes = Bytes::mib(2);
const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);
const BOTH: [GpuKind; 2] = [GpuKind::Cuda, GpuKind::Hip];

/// A file of the machine that says what happens while it is there.
fn says(machine: &Machine, file: &str) -> PathBuf {
    machine.library().with_file_name(file)
}

fn span(at: DeviceAddress, len: Bytes) -> AddressSpan {
    Span::new(at, len).unwrap()
}

/// Chunks of these sizes side by side, mapped and with access.
fn mapped(driver: &GpuDriver, device: DeviceId, lens: &[Bytes]) -> Result<(AddressSpan, Vec<Handle>), DriverError> {
    let len = lens.iter().copied().sum();
    let base = driver.reserve(device, len, GRANULE)?;
    let (mut at, mut handles) = (base, Vec::new());
    for len in lens {
        let handle = driver.create(device, *len)?;
        driver.map(at, handle)?;
        at = at.checked_add(*len).unwrap();
        handles.push(handle);
    }
    driver.set_access(span(base, len), device, Access::ReadWrite)?;
    Ok((span(base, len), handles))
}

fn lost<T: std::fmt::Debug>(device: DeviceId, outcome: Result<T, DriverError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error.cause, Cause::Lost { device: of, .. } if of == device), "{}", chain(&error));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[test]
fn every_call_for_a_device_that_is_gone_says_so_and_other_devices_go_on() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let (there, handles) = mapped(&driver, FIRST, &[GRANULE]).unwrap();
        let (stream, event) =
            (driver.create_stream(FIRST).unwrap(), driver.record_event(FIRST, StreamId::DEFAULT).unwrap());
        let fd = driver.export(handles[0]).unwrap();
        let empty = driver.reserve(FIRST, GRANULE, GRANULE).unwrap();
        let (others, _) = mapped(&driver, SECOND, &[GRANULE]).unwrap();
        std::fs::write(says(&machine, "lost"), "0").unwrap();
        lost(FIRST, driver.memory(FIRST));
        lost(FIRST, driver.create(FIRST, GRANULE));
        lost(FIRST, driver.export(handles[0]));
        lost(FIRST, driver.import(FIRST, fd.try_clone().unwrap(), GRANULE));
        lost(FIRST, driver.reserve(FIRST, GRANULE, GRANULE));
        lost(FIRST, driver.set_access(there, FIRST, Access::Read));
        lost(FIRST, driver.read(there.start(), &mut [0]));
        lost(FIRST, driver.write(there.start(), &[0]));
        lost(FIRST, driver.fill(FIRST, stream, there, 1));
        lost(FIRST, driver.create_stream(FIRST));
        lost(FIRST, driver.record_event(FIRST, stream));
        lost(FIRST, driver.query_event(event));
        lost(FIRST, driver.wait_event(FIRST, stream, event));
        lost(FIRST, driver.destroy_event(event));
        lost(FIRST, driver.destroy_stream(stream));
        lost(FIRST, driver.synchronize(FIRST));
        lost(FIRST, driver.unmap(there));
        lost(FIRST, driver.map(empty, handles[0]));
        lost(FIRST, driver.unreserve(span(empty, GRANULE)));
        lost(FIRST, driver.release(handles[0]));
        // The other device is unharmed.
        driver.write(others.start(), &[7]).unwrap();
        driver.synchronize(SECOND).unwrap();
        let handle = driver.create(SECOND, GRANULE).unwrap();
        assert_eq!(driver.memory(SECOND).unwrap().free, DEVICES[1] - GRANULE - GRANULE);
        driver.release(handle).unwrap();
        // Once it is back its books are as they were: nothing was half done.
        std::fs::remove_file(says(&machine, "lost")).unwrap();
        driver.unmap(there).unwrap();
        driver.unreserve(there).unwrap();
        driver.unreserve(span(empty, GRANULE)).unwrap();
        driver.release(handles[0]).unwrap();
        driver.destroy_event(event).unwrap();
        driver.destroy_stream(stream).unwrap();
        drop(fd);
        assert_eq!(driver.memory(FIRST).unwrap().free, DEVICES[0]);
    }
}

#[test]
fn a_device_that_is_gone_does_not_keep_those_whose_memory_it_reaches_from_growing() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        std::fs::write(says(&machine, "lost"), "1").unwrap();
        let (there, handles) = mapped(&driver, FIRST, &[GRANULE, GRANULE]).unwrap();
        driver.write(there.start(), &[7]).unwrap();
        driver.unmap(there).unwrap();
        driver.unreserve(there).unwrap();
        handles.into_iter().for_each(|handle| driver.release(handle).unwrap());
        assert_eq!(driver.memory(FIRST).unwrap().free, DEVICES[0]);
    }
}

#[test]
fn access_that_fails_for_want_of_memory_is_an_error_and_takes_it_from_no_device() {
    let peers = "peers = all\nfail = 1 set_access\nfail_code = 2";
    let machine = Machine::new(GpuKind::Cuda, &conf(peers));
    let driver = open(&machine, GpuKind::Cuda);
    let error = mapped(&driver, FIRST, &[GRANULE]).unwrap_err();
    assert!(matches!(error.cause, Cause::Library { code: 2, .. }), "{}", chain(&error));
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    mapped(&driver, FIRST, &[GRANULE]).unwrap();
}

#[test]
fn a_peer_that_is_gone_is_left_out_alone_and_is_not_asked_for_again() {
    // Which of the calls that set access runs out of memory: where the error shows says what that call was for.
    let shows = |nth: u32| {
        let three = "devices = 67108864, 67108864, 67108864";
        let machine = Machine::new(GpuKind::Cuda, &format!("{three}\nfail = {nth} set_access\nfail_code = 2"));
        let driver = open(&machine, GpuKind::Cuda);
        std::fs::write(says(&machine, "lost"), "1").unwrap();
        let outcomes = [1, 2, 3].map(|_| mapped(&driver, FIRST, &[GRANULE]).map(drop));
        outcomes.iter().position(Result::is_err)
    };
    // All three; the first alone; with the second, which is gone, and that is no error; with the third. From then on one call for the two.
    assert_eq!([1, 2, 4, 5, 6].map(shows), [Some(0), Some(0), Some(0), Some(1), Some(2)]);
    assert_eq!(shows(7), None);
}

#[test]
fn of_devices_with_one_uuid_the_first_is_used_alone() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf("one_uuid = 1"));
        let devices = open(&machine, kind).devices();
        assert_eq!(devices.iter().map(|device| device.id).collect::<Vec<_>>(), [FIRST], "{kind:?}");
    }
}

#[test]
fn an_answer_that_may_mean_anything_is_a_loss_where_the_management_library_says_so() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let handle = driver.create(FIRST, GRANULE).unwrap();
        std::fs::write(says(&machine, "reset"), "0").unwrap();
        let outcomes =
            [driver.memory(FIRST).map(drop), driver.create(FIRST, GRANULE).map(drop), driver.release(handle)];
        for error in outcomes.map(Result::unwrap_err) {
            let is_lost = matches!(error.cause, Cause::Lost { device: FIRST, reason } if reason.contains("reset"));
            // HIP has nobody who could tell.
            let is_unknown = matches!(error.cause, Cause::Library { code: 999, .. });
            assert!(if kind == GpuKind::Cuda { is_lost } else { is_unknown }, "{}", chain(&error));
        }
        let other = driver.create(SECOND, GRANULE).unwrap();
        driver.release(other).unwrap();
    }
}

#[test]
fn a_device_that_was_gone_before_leaves_a_gap_and_the_others_their_numbers() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        std::fs::write(says(&machine, "lost"), "0").unwrap();
        let driver = open(&machine, kind);
        assert_eq!(
            driver.devices().iter().map(|device| (device.id, device.total)).collect::<Vec<_>>(),
            [(SECOND, DEVICES[1])]
        );
        let error = driver.create(FIRST, GRANULE).unwrap_err();
        assert!(matches!(error.cause, Cause::NoDevice { device: FIRST, .. }), "{}", chain(&error));
        let (there, _) = mapped(&driver, SECOND, &[GRANULE]).unwrap();
        driver.write(there.start(), &[7]).unwrap();
        assert_eq!(driver.memory(SECOND).unwrap().free, DEVICES[1] - GRANULE);
        let chunks = std::fs::read_dir(machine.library().parent().unwrap()).unwrap().flatten();
        let of_second = chunks.filter(|entry| entry.file_name().to_string_lossy().starts_with("chunk-1-"));
        assert_eq!(of_second.count(), 1, "its memory, and no other device's");
    }
}

#[test]
fn a_full_table_of_exports_is_named_and_a_closed_export_makes_room() {
    let machine = Machine::new(GpuKind::Cuda, &conf("export_slots = 2"));
    let here = open(&machine, GpuKind::Cuda);
    let handle = here.create(FIRST, GRANULE).unwrap();
    let (first, second) = (here.export(handle).unwrap(), here.export(handle).unwrap());
    let copy = first.try_clone().unwrap();
    let full = |outcome: Result<_, DriverError>| {
        let error = outcome.unwrap_err();
        let is_told =
            matches!(error.cause, Cause::TooMany { what: "exports of this machine", limit: limits::EXPORTS_MAX, .. });
        assert!(is_told && error.kind() == ErrorKind::Exhausted, "{}", chain(&error));
    };
    full(here.export(handle));
    // An import is no export, and a copy of a descriptor is the same one.
    let imported = here.import(FIRST, second, GRANULE).unwrap();
    let third = here.export(handle).unwrap();
    drop(first);
    full(here.export(handle));
    drop(copy);
    let fourth = here.export(imported).unwrap();
    drop((third, fourth));
    here.release(imported).unwrap();
    here.release(handle).unwrap();
    assert_eq!(here.memory(FIRST).unwrap().free, DEVICES[0]);
}

#[test]
fn mappings_that_have_run_out_are_not_called_memory() {
    let machine = Machine::new(GpuKind::Cuda, &conf("mappings = 2"));
    let driver = open(&machine, GpuKind::Cuda);
    let error = mapped(&driver, FIRST, &[GRANULE; 3]).unwrap_err();
    let is_told = matches!(error.cause, Cause::TooMany { what: "mappings of this process", limit: 2, .. });
    assert!(is_told && error.kind() == ErrorKind::Exhausted, "{}", chain(&error));
}

#[test]
fn where_descriptors_have_run_out_memory_is_not_blamed() {
    alone("standin_machine::where_descriptors_have_run_out_memory_is_not_blamed", || {
        let named = |error: DriverError| {
            let is_told = matches!(error.cause, Cause::TooMany { what: "open files of this process", limit: 64, remedy } if remedy.contains("LimitNOFILE"));
            assert!(is_told && error.kind() == ErrorKind::Exhausted, "{}", chain(&error));
        };
        let all_limits = rustix::process::getrlimit(Resource::Nofile);
        for (kind, quirks) in [(GpuKind::Hip, "quirks = fd_per_handle"), (GpuKind::Cuda, ""), (GpuKind::Hip, "")] {
            rustix::process::setrlimit(Resource::Nofile, all_limits).unwrap();
            let machine = Machine::new(kind, &conf(quirks));
            let driver = open(&machine, kind);
            let first = driver.create(FIRST, GRANULE).unwrap();
            let fd = driver.export(first).unwrap();
            rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..all_limits }).unwrap();
            let mut handles = Vec::new();
            let error = loop {
                match driver.create(FIRST, GRANULE) {
                    Ok(handle) => handles.push(handle),
                    Err(error) => break error,
                }
            };
            assert!((8..60).contains(&handles.len()), "{} chunks and {}", handles.len(), chain(&error));
            named(error);
            let mut exports = Vec::new();
            named(loop {
                match driver.export(first) {
                    Ok(fd) => exports.push(fd),
                    Err(error) => break error,
                }
            });
            // The last descriptor is the one that goes with the import.
            named(driver.import(FIRST, fd, GRANULE).unwrap_err());
            drop(exports);
            handles.into_iter().for_each(|handle| driver.release(handle).unwrap());
            driver.release(first).unwrap();
        }
    });
}

#[test]
fn memory_that_has_run_out_is_blamed_also_where_chunks_hold_descriptors() {
    let machine = Machine::new(GpuKind::Hip, &conf("quirks = fd_per_handle"));
    let error = open(&machine, GpuKind::Hip).create(SECOND, DEVICES[1] + GRANULE).unwrap_err();
    assert!(matches!(error.cause, Cause::Exhausted { available, .. } if available == DEVICES[1]), "{}", chain(&error));
}

#[test]
fn access_is_given_to_who_reaches_the_memory_and_not_to_whom_its_device_reaches() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf("peers = 0>1"));
        let driver = open(&machine, kind);
        let fill = |from: DeviceId, memory: AddressSpan| {
            let stream = driver.create_stream(from)?;
            driver.fill(from, stream, memory, 9).and_then(|()| driver.synchronize(from))
        };
        let (of_second, _) = mapped(&driver, SECOND, &[GRANULE]).unwrap();
        fill(FIRST, of_second).unwrap();
        // It would end all work of this process, so it comes last.
        let (of_first, _) = mapped(&driver, FIRST, &[GRANULE]).unwrap();
        fill(SECOND, of_first).unwrap_err();
    }
}

#[test]
fn a_device_reaches_what_the_machine_says_and_access_is_given_to_nobody_else() {
    for kind in BOTH {
        for peers in ["all", "none", "0-1"] {
            let machine = Machine::new(kind, &conf(&format!("peers = {peers}")));
            let driver = open(&machine, kind);
            let (there, _) = mapped(&driver, FIRST, &[GRANULE, GRANULE]).unwrap();
            driver.write(there.start(), &[1, 2, 3]).unwrap();
            // Another device uses these addresses if it reaches them: the fill is done by the one whose stream it is.
            let stream = driver.create_stream(SECOND).unwrap();
            let filled = driver.fill(SECOND, stream, there, 9).and_then(|()| driver.synchronize(SECOND));
            assert_eq!(filled.is_ok(), peers != "none", "{kind:?}, {peers}: {filled:?}");
            if filled.is_ok() {
                let mut bytes = [0; 3];
                driver.read(there.start(), &mut bytes).unwrap();
                assert_eq!(bytes, [9; 3]);
            }
        }
    }
}

#[test]
fn what_a_device_can_do_is_told_and_chunks_ask_for_no_more() {
    let has = |kind, more: &str| {
        let machine = Machine::new(kind, &conf(more));
        let driver = open(&machine, kind);
        let handle = driver.create(SECOND, GRANULE).unwrap();
        let names = std::fs::read_dir(machine.library().parent().unwrap()).unwrap().flatten();
        let asked = names.filter(|entry| entry.file_name().to_string_lossy().ends_with("-rdma")).count();
        driver.release(handle).unwrap();
        let capabilities = driver.capabilities(SECOND).unwrap();
        assert_eq!(asked == 1, capabilities.rdma, "the flag is set when the chunk is made, or never");
        (capabilities.rdma, capabilities.fabric, capabilities.mps)
    };
    assert_eq!(has(GpuKind::Cuda, ""), (false, false, false));
    assert_eq!(has(GpuKind::Cuda, "rdma = 1"), (true, false, false));
    assert_eq!(has(GpuKind::Cuda, "fabric = 1"), (false, true, false));
    assert_eq!(has(GpuKind::Cuda, "mps = 1"), (false, false, true));
    // HIP has attributes for none of them.
    assert_eq!(has(GpuKind::Hip, "rdma = 1\nfabric = 1\nmps = 1"), (false, false, false));
}

#[test]
fn chunks_ask_for_handles_of_other_nodes_where_they_may_and_are_refused_once_where_they_may_not() {
    for (more, made, refused) in [("fabric = 1", 3, 0), ("fabric = 1\nimex = 0", 0, 1), ("", 0, 0)] {
        let machine = Machine::new(GpuKind::Cuda, &conf(more));
        let driver = open(&machine, GpuKind::Cuda);
        for _ in 0..3 {
            let handle = driver.create(SECOND, GRANULE).unwrap();
            // Passed on by descriptor all the same.
            let import = driver.import(SECOND, driver.export(handle).unwrap(), GRANULE).unwrap();
            driver.release(import).unwrap();
            driver.release(handle).unwrap();
        }
        let noted = |file: &str| {
            let text = std::fs::read_to_string(machine.library().with_file_name(file));
            text.map_or(0, |text| text.lines().count())
        };
        assert_eq!((noted("fabric-made"), noted("fabric-refused")), (made, refused), "{more}");
        assert_eq!(driver.capabilities(SECOND).unwrap().fabric, made > 0);
    }
}

#[test]
fn a_part_of_a_gpu_is_a_device_by_its_own_name_and_has_its_own_memory() {
    let machine = Machine::new(GpuKind::Cuda, &conf("mig = 1"));
    let driver = open(&machine, GpuKind::Cuda);
    let devices = driver.devices();
    assert_eq!(devices[1].uuid.0, *b"standin-cuda-001", "the part's name, not the name of the GPU that it is part of");
    let handle = driver.create(SECOND, GRANULE).unwrap();
    let memory = driver.memory(SECOND).unwrap();
    assert_eq!((memory.total, memory.free), (DEVICES[1], DEVICES[1] - GRANULE));
    driver.release(handle).unwrap();
}

#[test]
fn an_import_is_for_the_device_that_it_was_asked_for_whatever_the_thread_uses() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let made = driver.create(SECOND, GRANULE).unwrap();
        let imported = driver.import(SECOND, driver.export(made).unwrap(), GRANULE).unwrap();
        driver.release(made).unwrap();
        let base = driver.reserve(SECOND, GRANULE, GRANULE).unwrap();
        driver.map(base, imported).unwrap();
        driver.set_access(span(base, GRANULE), SECOND, Access::ReadWrite).unwrap();
        // The stand-in fails this for a chunk that was imported while another device was current.
        driver.write(base, &[1]).unwrap();
        assert_ne!(driver.native_handle(imported).unwrap(), 0);
    }
}

#[test]
fn chunks_of_several_sizes_get_access_where_sizes_are_added_up_from_the_first() {
    let quirks = "quirks = access_sums_from_first, unmap_run_breaks_free";
    for more in [quirks.to_owned(), format!("{quirks}, map_lies")] {
        let machine = Machine::new(GpuKind::Hip, &conf(&more));
        let driver = open(&machine, GpuKind::Hip);
        let lens = [Bytes::mib(8), Bytes::mib(2), Bytes::mib(2), Bytes::mib(4)];
        let (there, handles) = mapped(&driver, FIRST, &lens).unwrap();
        for at in [0, 8, 10, 12, 15] {
            driver.write(there.start().checked_add(Bytes::mib(at)).unwrap(), &[at as u8]).unwrap();
        }
        driver.unmap(there).unwrap();
        driver.unreserve(there).unwrap();
        handles.into_iter().for_each(|handle| driver.release(handle).unwrap());
        assert_eq!(driver.counts(), (0, 0, 0));
    }
}

#[test]
fn a_read_waits_for_a_busy_stream_to_its_end() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let stalls = Stalls::of(&machine);
        let (there, _) = mapped(&driver, FIRST, &[GRANULE]).unwrap();
        let stream = driver.create_stream(FIRST).unwrap();
        let busy = stalls.stall(FIRST, stream);
        driver.fill(FIRST, stream, there, 6).unwrap();
        let event = driver.record_event(FIRST, stream).unwrap();
        let (answer, answers) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut byte = [0];
                driver.read(there.start(), &mut byte).unwrap();
                answer.send(byte[0]).unwrap();
            });
            assert!(answers.recv_timeout(Duration::from_millis(30)).is_err(), "a read came back before the work");
            assert!(!driver.query_event(event).unwrap(), "nobody else waits meanwhile");
            drop(busy);
            assert_eq!(answers.recv().unwrap(), 6);
        });
    }
}

#[test]
fn where_what_runs_does_not_bear_it_memory_is_mapped_when_nothing_runs() {
    for (more, is_volta) in [("volta = 1", true), ("", false)] {
        let machine = Machine::new(GpuKind::Cuda, &conf(more));
        let driver = Arc::new(open(&machine, GpuKind::Cuda));
        let device = Device::open(Arc::clone(&driver) as Arc<dyn Driver>, FIRST).unwrap();
        assert_eq!(device.capabilities().maps_when_quiet, is_volta);
        let chunk = Arc::new(Chunk::create(&device, ChunkId(1), GRANULE).unwrap());
        let stalls = Stalls::of(&machine);
        let stream = driver.create_stream(FIRST).unwrap();
        let busy = stalls.stall(FIRST, stream);
        let (answer, answers) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| answer.send(Mapping::stitch(&[Arc::clone(&chunk)])).unwrap());
            let early = answers.recv_timeout(Duration::from_millis(if is_volta { 30 } else { 20_000 }));
            assert_eq!(early.is_err(), is_volta, "mapped under what runs, or not at all");
            // What is mapped is unmapped when nothing runs, everywhere.
            drop(busy);
            drop(early.unwrap_or_else(|_| answers.recv().unwrap()).unwrap());
        });
        driver.synchronize(FIRST).unwrap();
        // Whoever does not wait breaks what runs.
        let _busy = stalls.stall(FIRST, stream);
        let there = driver.reserve(FIRST, GRANULE, GRANULE).unwrap();
        let mapped = driver.map(there, driver.create(FIRST, GRANULE).unwrap());
        assert_eq!(mapped.is_err(), is_volta, "{mapped:?}");
    }
}

#[test]
fn a_call_that_hangs_comes_back_when_the_machine_lets_it() {
    // The second memory call: the create after the first.
    for (more, file) in [("hang_after = 2", None), ("", Some("hang"))] {
        let machine = Machine::new(GpuKind::Cuda, &conf(more));
        let driver = open(&machine, GpuKind::Cuda);
        let first = driver.create(FIRST, GRANULE).unwrap();
        if let Some(file) = file {
            std::fs::write(says(&machine, file), "export, create").unwrap();
        }
        let (answer, answers) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| answer.send(driver.create(FIRST, GRANULE)).unwrap());
            assert!(answers.recv_timeout(Duration::from_millis(30)).is_err(), "the call did not hang");
            match file {
                Some(file) => std::fs::remove_file(says(&machine, file)).unwrap(),
                None => std::fs::write(says(&machine, "resume"), "").unwrap(),
            }
            let second = answers.recv().unwrap().unwrap();
            driver.release(second).unwrap();
        });
        driver.release(first).unwrap();
    }
}

#[test]
fn a_hanging_call_keeps_nobody_from_other_devices() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let first = driver.create(FIRST, GRANULE).unwrap();
        std::fs::write(says(&machine, "hang"), "create@0").unwrap();
        let (answer, answers) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| answer.send(driver.create(FIRST, GRANULE)).unwrap());
            let ((other, others), driver) = (mpsc::channel(), &driver);
            scope.spawn(move || {
                let chunk = driver.create(SECOND, GRANULE).unwrap();
                let imported = driver.import(SECOND, driver.export(chunk).unwrap(), GRANULE).unwrap();
                driver.release(chunk).unwrap();
                driver.release(imported).unwrap();
                other.send(driver.memory(FIRST).unwrap()).unwrap();
            });
            let memory = others.recv_timeout(Duration::from_secs(20));
            // Whatever came of it, the threads must end.
            std::fs::remove_file(says(&machine, "hang")).unwrap();
            assert_eq!(memory.expect("the other device waits").free, DEVICES[0] - GRANULE);
            driver.release(answers.recv().unwrap().unwrap()).unwrap();
        });
        driver.release(first).unwrap();
        assert_eq!(driver.counts(), (0, 0, 0));
    }
}

#[test]
fn a_forked_child_is_refused_and_its_parent_goes_on() {
    alone("standin_machine::a_forked_child_is_refused_and_its_parent_goes_on", || {
        for kind in BOTH {
            let machine = Machine::new(kind, &conf(""));
            let driver = open(&machine, kind);
            let handle = driver.create(FIRST, GRANULE).unwrap();
            let code = forked(|| match driver.create(FIRST, GRANULE).map_err(|error| error.cause) {
                Err(cause @ Cause::Library { code, .. }) if cause.kind() == ErrorKind::Unavailable => code as u8,
                _ => 99,
            });
            assert_eq!(code, 3, "not initialized");
            assert_eq!(driver.memory(FIRST).unwrap().free, DEVICES[0] - GRANULE);
            driver.release(handle).unwrap();
        }
    });
}

#[test]
fn a_fill_that_goes_where_it_must_not_ends_everything_for_its_process() {
    let machine = Machine::new(GpuKind::Cuda, &conf(""));
    let driver = open(&machine, GpuKind::Cuda);
    let stalls = Stalls::of(&machine);
    let (there, _) = mapped(&driver, FIRST, &[GRANULE]).unwrap();
    let stream = driver.create_stream(FIRST).unwrap();
    let busy = stalls.stall(FIRST, stream);
    driver.fill(FIRST, stream, there, 6).unwrap();
    // What the callers of `unmap` must not do: there is work that uses it.
    driver.unmap(there).unwrap();
    driver.create(SECOND, GRANULE).unwrap();
    drop(busy);
    for outcome in [driver.synchronize(FIRST), driver.create(SECOND, GRANULE).map(drop)] {
        let error = outcome.unwrap_err();
        // No device is lost: it is the process that cannot go on.
        let is_told = matches!(error.cause, Cause::Library { code: 700, .. });
        assert!(is_told && error.kind() == ErrorKind::Broken, "{}", chain(&error));
    }
}

#[test]
fn an_all_reduce_of_what_may_not_be_used_is_refused_before_the_library_is_asked() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf(""));
        let driver = open(&machine, kind);
        let len = Bytes::mib(4);
        let rank = |device| {
            let start = || mapped(&driver, device, &[GRANULE, GRANULE]).unwrap().0.start();
            Rank { device, stream: driver.create_stream(device).unwrap(), from: start(), to: start() }
        };
        let (first, second) = (rank(FIRST), rank(SECOND));
        let refused = |wrong: Rank, len| driver.all_reduce(&[first, wrong], len).unwrap_err().cause;
        let nowhere = DeviceAddress::new(GRANULE.get());
        for wrong in [Rank { from: nowhere, ..second }, Rank { to: nowhere, ..second }] {
            assert!(matches!(refused(wrong, len), Cause::NotMapped(_)), "{:?}", refused(wrong, len));
        }
        assert!(matches!(refused(second, Bytes::gib(1)), Cause::NotMapped(_)), "there is more behind what is mapped");
        let bare = driver.reserve(SECOND, len, GRANULE).unwrap();
        driver.map(bare, driver.create(SECOND, len).unwrap()).unwrap();
        assert!(matches!(refused(Rank { from: bare, ..second }, len), Cause::NoAccess(_)));
        driver.set_access(span(bare, len), SECOND, Access::Read).unwrap();
        assert!(matches!(refused(Rank { to: bare, ..second }, len), Cause::NoAccess(_)), "it would be written to");
        let gone = driver.create_stream(SECOND).unwrap();
        driver.destroy_stream(gone).unwrap();
        for stream in [gone, first.stream, StreamId::DEFAULT] {
            let cause = refused(Rank { stream, ..second }, len);
            assert_eq!((&cause, cause.kind()), (&Cause::UnknownStream(stream), ErrorKind::NotFound));
        }
        let nobody = DeviceId(7);
        assert!(matches!(refused(Rank { device: nobody, ..second }, len), Cause::NoDevice { .. }));
        let communicators = || std::fs::read_to_string(says(&machine, "communicators-made")).unwrap_or_default();
        assert_eq!(communicators(), "", "the library was asked");
        // What may be used is added up; to give, being read is enough.
        driver.write(first.from, &[5]).unwrap();
        driver.all_reduce(&[first, Rank { from: bare, ..second }], len).unwrap();
        let mut sum = [0];
        driver.read(second.to, &mut sum).unwrap();
        assert_eq!((sum, communicators().lines().count()), ([5], 2));
    }
}

#[test]
fn chunks_are_as_large_as_the_coarsest_device_wants_and_never_below_2_mib() {
    for (granularity, expected) in [
        ("4096", Bytes::mib(2)),
        ("65536", Bytes::mib(2)),
        ("4096, 65536", Bytes::mib(2)),
        ("2097152, 4194304", Bytes::mib(4)),
        ("8388608, 4096", Bytes::mib(8)),
    ] {
        for kind in BOTH {
            let machine = Machine::new(kind, &conf(&format!("granularity = {granularity}")));
            let driver = open(&machine, kind);
            for device in [FIRST, SECOND] {
                assert_eq!(driver.capabilities(device).unwrap().granularity, expected, "{granularity}, {device}");
                let half = Bytes::new(expected.get() / 2);
                let error = driver.create(device, half).unwrap_err();
                assert!(matches!(error.cause, Cause::Misaligned { unit, .. } if unit == expected), "{}", chain(&error));
                let base = driver.reserve(device, expected, expected).unwrap();
                let handle = driver.create(device, expected).unwrap();
                driver.map(base, handle).unwrap();
                driver.set_access(span(base, expected), device, Access::ReadWrite).unwrap();
                driver.write(base, &[1]).unwrap();
            }
        }
    }
}

#[test]
fn addresses_that_lie_wrong_and_cannot_be_given_back_do_not_keep_others_from_coming() {
    for kind in BOTH {
        let machine = Machine::new(kind, &conf("quirks = ignores_alignment\nfail = 1 unreserve"));
        let driver = open(&machine, kind);
        // What comes lies at any multiple of 2 MiB, so hardly ever at one of 1 TiB.
        let alignment = Bytes::gib(1024);
        let base = driver.reserve(FIRST, GRANULE, alignment).unwrap();
        assert!(base.get().is_multiple_of(alignment.get()), "{base}");
        assert_eq!(driver.counts(), (0, 0, 1), "what was lost is in no book");
        driver.unreserve(span(base, GRANULE)).unwrap();
        assert_eq!(driver.counts(), (0, 0, 0));
    }
}
