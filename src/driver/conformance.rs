//! The one suite that every driver must pass: the rules in the header of [`super`], each as a check that fails on a driver which
//! breaks it. Checks find out by [`Capabilities`] what a driver can do, and skip what it says it cannot.
//!
//! Every check leaves the device as it found it, and [`run`] holds it to that.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::{Access, Capabilities, Cause, Driver, DriverError, Handle};
use crate::error::{ErrorKind, chain};
use crate::ids::{DeviceId, StreamId};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place, Span};

/// A driver under test.
pub struct Subject<'a> {
    /// The driver.
    pub driver: &'a dyn Driver,
    /// The device to use. Nobody else uses it meanwhile.
    pub device: DeviceId,
    /// Makes a stream busy until the answer is dropped, where the driver can pretend that.
    pub stall: Option<&'a dyn Fn(StreamId) -> Box<dyn std::any::Any>>,
}

/// How one check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The driver keeps the rule.
    Passed,
    /// The driver says that it cannot do this.
    Skipped(&'static str),
    /// The driver breaks the rule, and how.
    Failed(String),
}

type Verdict = Result<Option<&'static str>, String>;
type Check = fn(&Subject<'_>, Capabilities) -> Verdict;

const DONE: Verdict = Ok(None);

/// Every check with its name: what it checks, as a sentence.
pub const CHECKS: &[(&str, Check)] = &[
    ("a_size_that_is_not_whole_granules_is_refused", sizes),
    ("created_bytes_leave_the_device_and_released_bytes_return", accounting),
    ("a_create_beyond_what_is_free_is_exhausted_and_changes_nothing", exhaustion),
    ("fresh_memory_is_zero", zeroed),
    ("a_handle_can_be_released_once", double_release),
    ("reservations_are_aligned_apart_and_given_back_exactly", reservations),
    ("a_mapping_needs_a_reservation_that_is_free_there", mapping_rules),
    ("a_fresh_mapping_has_no_access_until_it_is_set", access_rules),
    ("a_read_only_mapping_refuses_writes", read_only),
    ("one_set_access_covers_a_run_of_mappings", access_run),
    ("unmap_covers_whole_mappings_without_a_hole", unmapping),
    ("a_chunk_mapped_twice_shows_the_same_bytes", aliases),
    ("memory_lives_while_a_mapping_does", release_while_mapped),
    ("an_import_is_the_same_memory_and_leaves_the_descriptor", import),
    ("bytes_return_only_when_the_last_descriptor_is_gone", descriptors),
    ("a_descriptor_that_is_not_this_chunk_is_refused", foreign_descriptors),
    ("an_import_of_less_than_the_chunk_shows_no_more_than_that", smaller_import),
    ("an_import_is_passed_on_or_refused_and_unharmed", reexport),
    ("a_chunk_has_a_handle_of_the_vendors_while_it_has_one_of_ours", native_handles),
    ("work_on_a_stream_is_done_in_order_and_events_tell", streams),
    ("a_stream_waits_for_an_event_of_another", cross_stream),
    ("synchronize_waits_for_all_that_was_queued", synchronize),
];

/// Runs every check.
pub fn run(subject: &Subject<'_>) -> Vec<(&'static str, Outcome)> {
    // What a process takes once, with its first use of a device, is not a check's: a context, on GPUs. Whatever fails here fails again in a check.
    let _ = warm_up(subject);
    CHECKS.iter().map(|(name, check)| (*name, run_one(subject, *check))).collect()
}

fn warm_up(subject: &Subject<'_>) -> Result<(), String> {
    let Subject { driver, device, .. } = subject;
    let capabilities = ok("capabilities", driver.capabilities(*device))?;
    let mapped = Mapped::new(subject, capabilities.granularity, 1)?;
    let stream = ok("create stream", driver.create_stream(*device))?;
    if capabilities.contents {
        ok("fill", driver.fill(*device, stream, mapped.span(), 1))?;
        read_byte(subject, mapped.base)?;
    }
    ok("synchronize", driver.synchronize(*device))?;
    ok("destroy stream", driver.destroy_stream(stream))?;
    mapped.end(subject)
}

fn run_one(subject: &Subject<'_>, check: Check) -> Outcome {
    let measured = || {
        let capabilities = subject.driver.capabilities(subject.device)?;
        Ok::<_, DriverError>((capabilities, subject.driver.memory(subject.device)?.free))
    };
    let (capabilities, free) = match measured() {
        Ok(measured) => measured,
        Err(error) => return Outcome::Failed(chain(&error)),
    };
    let verdict = match check(subject, capabilities) {
        Err(reason) => return Outcome::Failed(reason),
        Ok(verdict) => verdict,
    };
    let mut waited = Duration::ZERO;
    loop {
        match measured() {
            Ok((_, after)) if after == free => return verdict.map_or(Outcome::Passed, Outcome::Skipped),
            Ok((_, after)) if waited >= PATIENCE => {
                return Outcome::Failed(format!("{free} were free before the check and {after} are after it"));
            }
            Ok(_) => {}
            Err(error) => return Outcome::Failed(chain(&error)),
        }
        std::thread::sleep(STEP);
        waited += STEP;
    }
}

/// How long bytes may take to return: a child that another thread has just begun has every descriptor, and with it the bytes, until it runs its own program.
const PATIENCE: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(10);

fn ok<T>(what: &str, answer: Result<T, DriverError>) -> Result<T, String> {
    answer.map_err(|error| format!("{what}: {}", chain(&error)))
}

fn refused<T>(what: &str, answer: Result<T, DriverError>, fits: impl Fn(&Cause) -> bool) -> Result<(), String> {
    match answer {
        Ok(_) => Err(format!("{what} was not refused")),
        Err(error) if fits(&error.cause) => Ok(()),
        Err(error) => Err(format!("{what} was refused for the wrong reason: {}", chain(&error))),
    }
}

fn expect(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

fn span(start: DeviceAddress, len: Bytes) -> AddressSpan {
    Span::new(start, len).expect("a reserved span fits")
}

fn after(start: DeviceAddress, len: Bytes) -> DeviceAddress {
    start.checked_add(len).expect("a reserved span fits")
}

/// Chunks of one granule, mapped side by side with access, and their reservation.
struct Mapped {
    base: DeviceAddress,
    handles: Vec<Handle>,
    granule: Bytes,
}

impl Mapped {
    fn new(subject: &Subject<'_>, granule: Bytes, count: u64) -> Result<Mapped, String> {
        let Subject { driver, device, .. } = subject;
        let len = granule.checked_mul(count).ok_or("too large")?;
        let base = ok("reserve", driver.reserve(*device, len, granule))?;
        let mut handles = Vec::new();
        for at in 0..count {
            let handle = ok("create", driver.create(*device, granule))?;
            ok("map", driver.map(after(base, Bytes::new(granule.get() * at)), handle))?;
            handles.push(handle);
        }
        ok("set access", driver.set_access(span(base, len), *device, Access::ReadWrite))?;
        Ok(Mapped { base, handles, granule })
    }

    fn span(&self) -> AddressSpan {
        span(self.base, Bytes::new(self.granule.get() * self.handles.len() as u64))
    }

    fn end(self, subject: &Subject<'_>) -> Result<(), String> {
        ok("unmap", subject.driver.unmap(self.span()))?;
        ok("unreserve", subject.driver.unreserve(self.span()))?;
        for handle in self.handles {
            ok("release", subject.driver.release(handle))?;
        }
        Ok(())
    }
}

fn read_byte(subject: &Subject<'_>, at: DeviceAddress) -> Result<u8, String> {
    let mut byte = [0xee];
    ok("read", subject.driver.read(at, &mut byte))?;
    Ok(byte[0])
}

fn sizes(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    expect(granule.get().is_power_of_two(), "the granularity is not a power of two")?;
    for len in [0, 1, granule.get() - 1, granule.get() + 1, u64::MAX] {
        // A layer around the driver may find first that nobody has that much.
        let misaligned = |cause: &Cause| {
            cause.kind() == ErrorKind::Invalid || (len == u64::MAX && cause.kind() == ErrorKind::Exhausted)
        };
        refused(&format!("create of {len} bytes"), driver.create(*device, Bytes::new(len)), misaligned)?;
        refused(&format!("reserve of {len} bytes"), driver.reserve(*device, Bytes::new(len), granule), misaligned)?;
    }
    let nowhere = DeviceId(u32::MAX);
    refused("create on no device", driver.create(nowhere, granule), |cause| matches!(cause, Cause::NoDevice { .. }))?;
    DONE
}

fn accounting(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let before = ok("memory", driver.memory(*device))?;
    expect(before.free <= before.total, "more is free than there is")?;
    let len = Bytes::new(capabilities.granularity.get() * 3);
    let handle = ok("create", driver.create(*device, len))?;
    let during = ok("memory", driver.memory(*device))?;
    ok("release", driver.release(handle))?;
    expect(before.free.saturating_sub(during.free) == len, "create did not take exactly its bytes")?;
    DONE
}

fn exhaustion(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let before = ok("memory", driver.memory(*device))?;
    let len = before.total + capabilities.granularity;
    let Some(len) = len.round_up(capabilities.granularity) else { return Ok(Some("the device is too large")) };
    let names_numbers = |cause: &Cause| matches!(cause, Cause::Exhausted { requested, available, .. } if *requested == len && *available == before.free);
    refused("create of more than the device has", driver.create(*device, len), names_numbers)?;
    let handle = ok("a create after a refused one", driver.create(*device, capabilities.granularity))?;
    ok("release", driver.release(handle))?;
    DONE
}

fn zeroed(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    if !capabilities.contents || !capabilities.clears_memory {
        return Ok(Some("the driver has no contents, or does not clear memory"));
    }
    // Dirty memory first, so that a driver which hands it out again is caught.
    for value in [0xab, 0] {
        let mapped = Mapped::new(subject, capabilities.granularity, 2)?;
        let mut bytes = vec![0xff; mapped.span().len().get() as usize];
        ok("read", subject.driver.read(mapped.base, &mut bytes))?;
        let clean = bytes.iter().all(|byte| *byte == 0);
        bytes.fill(value);
        ok("write", subject.driver.write(mapped.base, &bytes))?;
        mapped.end(subject)?;
        expect(clean, "fresh memory is not zero")?;
    }
    DONE
}

fn double_release(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let handle = ok("create", driver.create(*device, capabilities.granularity))?;
    ok("release", driver.release(handle))?;
    let unknown = |cause: &Cause| matches!(cause, Cause::UnknownHandle(_));
    refused("a second release", driver.release(handle), unknown)?;
    refused("export of a released handle", driver.export(handle), unknown)?;
    DONE
}

fn reservations(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let len = Bytes::new(granule.get() * 2);
    let wide = Bytes::new(granule.get() * 16);
    let first = ok("reserve", driver.reserve(*device, len, granule))?;
    let second = ok("reserve", driver.reserve(*device, len, wide))?;
    expect(first.get().is_multiple_of(granule.get()), "a reservation is not aligned to the granularity")?;
    expect(second.get().is_multiple_of(wide.get()), "a reservation is not aligned as asked for")?;
    expect(!span(first, len).overlaps(span(second, len)), "two reservations overlap")?;
    // All of it can be used.
    let handle = ok("create", driver.create(*device, len))?;
    ok("map", driver.map(second, handle))?;
    ok("unmap", driver.unmap(span(second, len)))?;
    ok("release", driver.release(handle))?;
    for alignment in [Bytes::ZERO, Bytes::new(granule.get() + 1), Bytes::new(granule.get() / 2)] {
        refused("an impossible alignment", driver.reserve(*device, len, alignment), |cause| {
            matches!(cause, Cause::Misaligned { .. })
        })?;
    }
    let inexact = |cause: &Cause| matches!(cause, Cause::NotAReservation(_));
    refused("unreserve of a part", driver.unreserve(span(first, granule)), inexact)?;
    refused("unreserve of an inner part", driver.unreserve(span(after(first, granule), granule)), inexact)?;
    ok("unreserve", driver.unreserve(span(first, len)))?;
    refused("a second unreserve", driver.unreserve(span(first, len)), inexact)?;
    ok("unreserve", driver.unreserve(span(second, len)))?;
    DONE
}

fn mapping_rules(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let twice = Bytes::new(granule.get() * 2);
    let base = ok("reserve", driver.reserve(*device, twice, granule))?;
    let (one, two) = (ok("create", driver.create(*device, granule))?, ok("create", driver.create(*device, twice))?);
    let outside = |cause: &Cause| matches!(cause, Cause::NotReserved(_));
    refused("map outside any reservation", driver.map(DeviceAddress::new(granule.get()), one), outside)?;
    refused("map over the end of a reservation", driver.map(after(base, granule), two), outside)?;
    refused("map at an unaligned address", driver.map(after(base, Bytes::new(512)), one), |cause| {
        matches!(cause, Cause::Misaligned { .. })
    })?;
    ok("map", driver.map(base, one))?;
    let taken = |cause: &Cause| matches!(cause, Cause::AlreadyMapped(_));
    refused("map over a mapping", driver.map(base, two), taken)?;
    refused("unreserve under a mapping", driver.unreserve(span(base, twice)), taken)?;
    ok("unmap", driver.unmap(span(base, granule)))?;
    ok("map after unmap", driver.map(base, two))?;
    ok("unmap", driver.unmap(span(base, twice)))?;
    ok("unreserve", driver.unreserve(span(base, twice)))?;
    ok("release", driver.release(one))?;
    ok("release", driver.release(two))?;
    DONE
}

fn access_rules(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let twice = Bytes::new(granule.get() * 2);
    let base = ok("reserve", driver.reserve(*device, twice, granule))?;
    let handle = ok("create", driver.create(*device, granule))?;
    let no_access = |cause: &Cause| matches!(cause, Cause::NoAccess(_));
    for round in ["a fresh mapping", "a mapping made again"] {
        ok("map", driver.map(base, handle))?;
        if capabilities.contents {
            refused(&format!("read of {round}"), driver.read(base, &mut [0]), no_access)?;
            refused(&format!("write to {round}"), driver.write(base, &[0]), no_access)?;
        }
        refused("set access over a hole", driver.set_access(span(base, twice), *device, Access::ReadWrite), |cause| {
            matches!(cause, Cause::NotMapped(_))
        })?;
        ok("set access", driver.set_access(span(base, granule), *device, Access::ReadWrite))?;
        if capabilities.contents {
            ok("write", driver.write(base, &[1]))?;
            refused("read past the end of a mapping", driver.read(after(base, granule), &mut [0]), |cause| {
                matches!(cause, Cause::NotMapped(_))
            })?;
        }
        ok("unmap", driver.unmap(span(base, granule)))?;
    }
    ok("unreserve", driver.unreserve(span(base, twice)))?;
    ok("release", driver.release(handle))?;
    DONE
}

fn read_only(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    if !capabilities.enforces_read_only || !capabilities.contents {
        return Ok(Some("the driver leaves this to the importer"));
    }
    let mapped = Mapped::new(subject, capabilities.granularity, 1)?;
    ok("set access", subject.driver.set_access(mapped.span(), subject.device, Access::Read))?;
    refused("write to a read-only mapping", subject.driver.write(mapped.base, &[1]), |cause| {
        matches!(cause, Cause::NoAccess(_))
    })?;
    read_byte(subject, mapped.base)?;
    mapped.end(subject)?;
    DONE
}

fn access_run(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let granule = capabilities.granularity;
    let mapped = Mapped::new(subject, granule, 3)?;
    if capabilities.contents {
        // Both sides of each border, with one copy.
        for at in [1, 2] {
            let border = after(mapped.base, Bytes::new(granule.get() * at - 2));
            ok("write over a border", subject.driver.write(border, &[1, 2, 3, 4]))?;
            let mut bytes = [0; 4];
            ok("read over a border", subject.driver.read(border, &mut bytes))?;
            expect(bytes == [1, 2, 3, 4], "what was written over a border is not there")?;
        }
    }
    mapped.end(subject)?;
    DONE
}

fn unmapping(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let len = Bytes::new(granule.get() * 4);
    let base = ok("reserve", driver.reserve(*device, len, granule))?;
    let large = ok("create", driver.create(*device, Bytes::new(granule.get() * 2)))?;
    let small = ok("create", driver.create(*device, granule))?;
    // large large small hole
    ok("map", driver.map(base, large))?;
    ok("map", driver.map(after(base, Bytes::new(granule.get() * 2)), small))?;
    let not_mapped = |cause: &Cause| matches!(cause, Cause::NotMapped(_));
    refused("unmap of half a mapping", driver.unmap(span(base, granule)), not_mapped)?;
    refused("unmap from inside a mapping", driver.unmap(span(after(base, granule), granule)), not_mapped)?;
    refused("unmap over a hole", driver.unmap(span(base, len)), not_mapped)?;
    refused("unmap of nothing", driver.unmap(span(base, Bytes::ZERO)), not_mapped)?;
    ok("unmap of two mappings at once", driver.unmap(span(base, Bytes::new(granule.get() * 3))))?;
    refused("a second unmap", driver.unmap(span(base, Bytes::new(granule.get() * 3))), not_mapped)?;
    ok("unreserve", driver.unreserve(span(base, len)))?;
    ok("release", driver.release(large))?;
    ok("release", driver.release(small))?;
    DONE
}

fn aliases(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let mapped = Mapped::new(subject, granule, 1)?;
    let base = ok("reserve", driver.reserve(*device, granule, granule))?;
    let second = driver.map(base, mapped.handles[0]);
    if capabilities.alias {
        ok("a second mapping", second)?;
        ok("set access", driver.set_access(span(base, granule), *device, Access::ReadWrite))?;
        if capabilities.contents {
            ok("write", driver.write(mapped.base, &[0x5a]))?;
            expect(read_byte(subject, base)? == 0x5a, "a write through one address is not seen through the other")?;
        }
        ok("unmap", driver.unmap(span(base, granule)))?;
        if capabilities.contents {
            expect(read_byte(subject, mapped.base)? == 0x5a, "unmapping one address disturbed the other")?;
        }
    } else {
        refused("a second mapping", second, |cause| matches!(cause, Cause::NoAlias))?;
    }
    ok("unreserve", driver.unreserve(span(base, granule)))?;
    mapped.end(subject)?;
    DONE
}

fn release_while_mapped(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let before = ok("memory", driver.memory(*device))?.free;
    let mapped = Mapped::new(subject, capabilities.granularity, 1)?;
    ok("release", driver.release(mapped.handles[0]))?;
    if capabilities.contents {
        ok("write after release", driver.write(mapped.base, &[7]))?;
        expect(read_byte(subject, mapped.base)? == 7, "memory was lost with its handle")?;
    }
    let during = ok("memory", driver.memory(*device))?.free;
    expect(during < before, "bytes returned while still mapped")?;
    ok("unmap", driver.unmap(mapped.span()))?;
    ok("unreserve", driver.unreserve(mapped.span()))?;
    DONE
}

fn import(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let mapped = Mapped::new(subject, granule, 1)?;
    let fd = ok("export", driver.export(mapped.handles[0]))?;
    let imported = ok("import", driver.import(*device, copy_of(&fd)?, granule))?;
    let again = ok("a second import of the same descriptor", driver.import(*device, copy_of(&fd)?, granule))?;
    expect(rustix::fs::fstat(&fd).is_ok(), "import took the descriptor")?;
    drop(fd);
    if capabilities.alias {
        let base = ok("reserve", driver.reserve(*device, granule, granule))?;
        ok("map", driver.map(base, imported))?;
        ok("set access", driver.set_access(span(base, granule), *device, Access::ReadWrite))?;
        if capabilities.contents {
            ok("write", driver.write(base, &[0x77]))?;
            expect(read_byte(subject, mapped.base)? == 0x77, "the import is not the same memory")?;
        }
        ok("unmap", driver.unmap(span(base, granule)))?;
        ok("unreserve", driver.unreserve(span(base, granule)))?;
    }
    ok("release", driver.release(imported))?;
    ok("release", driver.release(again))?;
    mapped.end(subject)?;
    DONE
}

fn descriptors(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let before = ok("memory", driver.memory(*device))?.free;
    let handle = ok("create", driver.create(*device, capabilities.granularity))?;
    let fd = ok("export", driver.export(handle))?;
    let copy = copy_of(&fd)?;
    ok("release", driver.release(handle))?;
    drop(fd);
    let during = ok("memory", driver.memory(*device))?.free;
    expect(during < before, "bytes returned while a descriptor was open")?;
    let imported = ok("import after release", driver.import(*device, copy, capabilities.granularity))?;
    let during = ok("memory", driver.memory(*device))?.free;
    expect(during < before, "bytes returned while an import had them")?;
    ok("release", driver.release(imported))?;
    DONE
}

fn copy_of(fd: &OwnedFd) -> Result<OwnedFd, String> {
    fd.try_clone().map_err(|error| error.to_string())
}

fn foreign_descriptors(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let not_a_chunk = |cause: &Cause| matches!(cause, Cause::NotAChunk { .. });
    let other = std::fs::File::open("/dev/null").map_err(|error| error.to_string())?.into();
    refused("import of /dev/null", driver.import(*device, other, granule), not_a_chunk)?;
    let handle = ok("create", driver.create(*device, granule))?;
    let fd = ok("export", driver.export(handle))?;
    let larger = Bytes::new(granule.get() * 2);
    let imported = driver.import(*device, fd, larger);
    if capabilities.checks_imports {
        refused("import with another size", imported, not_a_chunk)?;
    } else {
        let imported = ok("import with another size", imported)?;
        let base = ok("reserve", driver.reserve(*device, larger, granule))?;
        let mapped =
            driver.map(base, imported).and_then(|()| driver.set_access(span(base, larger), *device, Access::ReadWrite));
        expect(mapped.is_err(), "a chunk was mapped with another size")?;
        // Where the map itself said nothing it is there, in the books.
        let _ = driver.unmap(span(base, larger));
        ok("unreserve", driver.unreserve(span(base, larger)))?;
        ok("release", driver.release(imported))?;
    }
    ok("release", driver.release(handle))?;
    DONE
}

fn smaller_import(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let larger = Bytes::new(granule.get() * 2);
    let handle = ok("create", driver.create(*device, larger))?;
    let fd = ok("export", driver.export(handle))?;
    let base = ok("reserve", driver.reserve(*device, larger, granule))?;
    let imported = driver.import(*device, fd, granule);
    if capabilities.checks_imports {
        refused("import of half a chunk", imported, |cause| matches!(cause, Cause::NotAChunk { .. }))?;
    } else {
        let imported = ok("import of half a chunk", imported)?;
        let half = span(base, granule);
        let mapped = driver.map(base, imported).and_then(|()| driver.set_access(half, *device, Access::ReadWrite));
        // A vendor's text allows mapping less than there is. Then that is all that is there, and what follows is not.
        if mapped.is_ok() && capabilities.contents {
            ok("write", driver.write(base, &[5]))?;
            expect(read_byte(subject, base)? == 5, "half a chunk is mapped and keeps nothing")?;
            let behind = driver.read(after(base, granule), &mut [0]);
            refused("read behind half a chunk", behind, |cause| matches!(cause, Cause::NotMapped(_)))?;
        }
        let _ = driver.unmap(half);
        ok("release", driver.release(imported))?;
    }
    ok("map of the whole", driver.map(base, handle))?;
    ok("unmap", driver.unmap(span(base, larger)))?;
    ok("unreserve", driver.unreserve(span(base, larger)))?;
    ok("release", driver.release(handle))?;
    DONE
}

fn reexport(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let made = ok("create", driver.create(*device, granule))?;
    let fd = ok("export", driver.export(made))?;
    let imported = ok("import", driver.import(*device, fd, granule))?;
    ok("release", driver.release(made))?;
    // Whether an import can be exported is documented nowhere: only whoever made a chunk passes it on here.
    let second = match driver.export(imported) {
        Ok(fd) => Some(ok("import of an import's export", driver.import(*device, fd, granule))?),
        Err(_) => None,
    };
    let base = ok("reserve", driver.reserve(*device, granule, granule))?;
    for (value, handle) in [imported].into_iter().chain(second).enumerate() {
        ok("map", driver.map(base, handle))?;
        ok("set access", driver.set_access(span(base, granule), *device, Access::ReadWrite))?;
        if capabilities.contents {
            let found = read_byte(subject, base)?;
            expect(value == 0 || usize::from(found) == value, "what was passed on twice is other memory")?;
            ok("write", driver.write(base, &[value as u8 + 1]))?;
        }
        ok("unmap", driver.unmap(span(base, granule)))?;
    }
    ok("unreserve", driver.unreserve(span(base, granule)))?;
    for handle in [imported].into_iter().chain(second) {
        ok("release", driver.release(handle))?;
    }
    DONE
}

fn native_handles(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let granule = capabilities.granularity;
    let (one, two) = (ok("create", driver.create(*device, granule))?, ok("create", driver.create(*device, granule))?);
    let natives = match driver.native_handle(one) {
        Err(error) if matches!(error.cause, Cause::Unsupported { .. }) => None,
        first => Some((ok("native handle", first)?, ok("native handle", driver.native_handle(two))?)),
    };
    if let Some((first, second)) = natives {
        expect(first != second, "two chunks have one native handle")?;
        expect(ok("native handle", driver.native_handle(one))? == first, "a chunk's native handle changes")?;
    }
    ok("release", driver.release(one))?;
    if natives.is_some() {
        let unknown = |cause: &Cause| matches!(cause, Cause::UnknownHandle(_));
        refused("native handle of a released chunk", driver.native_handle(one), unknown)?;
    }
    ok("release", driver.release(two))?;
    Ok(natives.is_none().then_some("this driver has no handles of a vendor"))
}

fn streams(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let stream = ok("create stream", driver.create_stream(*device))?;
    let idle = ok("record", driver.record_event(*device, stream))?;
    expect(ok("query", driver.query_event(idle))?, "an event on an idle stream is not complete")?;
    ok("destroy", driver.destroy_event(idle))?;
    refused("query of a destroyed event", driver.query_event(idle), |cause| matches!(cause, Cause::UnknownEvent(_)))?;
    if let Some(stall) = subject.stall {
        let mapped = Mapped::new(subject, capabilities.granularity, 1)?;
        let busy = stall(stream);
        if capabilities.contents {
            ok("fill", driver.fill(*device, stream, mapped.span(), 1))?;
            ok("fill", driver.fill(*device, stream, mapped.span(), 2))?;
        }
        let event = ok("record", driver.record_event(*device, stream))?;
        expect(!ok("query", driver.query_event(event))?, "an event completed before the work ahead of it")?;
        // Where copies wait for it to the end there is nobody to look.
        if capabilities.contents && !capabilities.copies_wait {
            expect(read_byte(subject, mapped.base)? == 0, "a stalled stream went on")?;
        }
        drop(busy);
        expect(ok("query", driver.query_event(event))?, "the event did not complete after its work")?;
        if capabilities.contents {
            expect(read_byte(subject, mapped.base)? == 2, "work of one stream was done out of order")?;
        }
        ok("destroy", driver.destroy_event(event))?;
        mapped.end(subject)?;
    }
    ok("destroy stream", driver.destroy_stream(stream))?;
    Ok(subject.stall.is_none().then_some("this driver cannot pretend a busy stream"))
}

fn cross_stream(subject: &Subject<'_>, _capabilities: Capabilities) -> Verdict {
    let Some(stall) = subject.stall else { return Ok(Some("this driver cannot pretend a busy stream")) };
    let Subject { driver, device, .. } = subject;
    let (first, second) =
        (ok("create stream", driver.create_stream(*device))?, ok("create stream", driver.create_stream(*device))?);
    let busy = stall(first);
    let ahead = ok("record", driver.record_event(*device, first))?;
    ok("wait", driver.wait_event(*device, second, ahead))?;
    let behind = ok("record", driver.record_event(*device, second))?;
    expect(!ok("query", driver.query_event(behind))?, "a stream did not wait for the event")?;
    drop(busy);
    expect(ok("query", driver.query_event(behind))?, "a stream still waits for a complete event")?;
    for event in [ahead, behind] {
        ok("destroy", driver.destroy_event(event))?;
    }
    for stream in [first, second] {
        ok("destroy stream", driver.destroy_stream(stream))?;
    }
    DONE
}

fn synchronize(subject: &Subject<'_>, capabilities: Capabilities) -> Verdict {
    let Subject { driver, device, .. } = subject;
    let stream = ok("create stream", driver.create_stream(*device))?;
    let mapped = Mapped::new(subject, capabilities.granularity, 1)?;
    if capabilities.contents {
        ok("fill", driver.fill(*device, stream, mapped.span(), 9))?;
    }
    let event = ok("record", driver.record_event(*device, stream))?;
    ok("synchronize", driver.synchronize(*device))?;
    expect(ok("query", driver.query_event(event))?, "synchronize came back before the work was done")?;
    if capabilities.contents {
        expect(read_byte(subject, mapped.base)? == 9, "synchronize came back before the bytes were set")?;
    }
    ok("destroy", driver.destroy_event(event))?;
    mapped.end(subject)?;
    ok("destroy stream", driver.destroy_stream(stream))?;
    DONE
}
