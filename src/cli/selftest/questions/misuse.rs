//! What each misuse is answered with: by the library, or by the books that stand before it because some libraries crash or lie.

use serde_json::{Map, json};

use super::{Answer, Found, Subject};
use crate::cli::selftest::helper::Helper;
use crate::cli::selftest::probe::{Role, in_words};
use crate::driver::{Access, Driver, DriverError};
use crate::error::chain;
use crate::units::{Bytes, Place as _, Span};

pub(super) fn answers(subject: &Subject) -> Found {
    let (driver, id, granule) = (subject.driver(), subject.device.id(), subject.granularity());
    let twice = Bytes::new(2 * granule.get());
    let total = subject.description.total;
    let mut told = Map::new();
    let mut tell = |misuse: &str, outcome: Result<(), DriverError>| {
        let words = outcome.map_or_else(|error| chain(&error), |()| "done".to_owned());
        told.insert(misuse.to_owned(), json!(words));
    };
    tell("create_of_no_bytes", made(driver, driver.create(id, Bytes::ZERO)));
    tell("create_of_half_a_granule", made(driver, driver.create(id, Bytes::new(granule.get() / 2))));
    tell("create_of_more_than_there_is", made(driver, driver.create(id, total.round_down(granule) + granule)));
    let null = std::fs::File::open("/dev/null").map_err(|error| error.to_string())?;
    tell("import_of_dev_null", made(driver, driver.import(id, null.into(), granule)));
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
    tell("import_of_a_socket", made(driver, driver.import(id, socket.map_err(|error| error.to_string())?, granule)));
    let chunk = driver.create(id, granule).map_err(in_words)?;
    let fd = driver.export(chunk).map_err(in_words)?;
    tell("import_with_another_size", made(driver, driver.import(id, fd, twice)));
    let start = driver.reserve(id, twice, granule).map_err(in_words)?;
    let span = |len| Span::new(start, len).expect("a reserved span fits");
    let second = start.checked_add(granule).expect("a reserved span fits");
    tell("set_access_of_what_is_not_mapped", driver.set_access(span(granule), id, Access::ReadWrite));
    tell("unmap_of_what_is_not_mapped", driver.unmap(span(granule)));
    driver.map(start, chunk).map_err(in_words)?;
    tell("map_over_a_mapping", driver.map(start, chunk));
    tell("map_past_the_reservation", driver.map(span(twice).end(), chunk));
    tell("read_without_access", driver.read(start, &mut [0]));
    tell("set_access_over_a_hole", driver.set_access(span(twice), id, Access::ReadWrite));
    tell("unmap_over_a_hole", driver.unmap(span(twice)));
    tell("unreserve_of_what_is_mapped", driver.unreserve(span(twice)));
    if subject.capabilities().alias {
        let outcome = driver.map(second, chunk);
        if outcome.is_ok() {
            driver.unmap(Span::new(second, granule).expect("a reserved span fits")).map_err(in_words)?;
        }
        tell("map_of_a_chunk_twice", outcome);
    }
    driver.unmap(span(granule)).map_err(in_words)?;
    tell("unreserve_of_a_part", driver.unreserve(span(granule)));
    driver.unreserve(span(twice)).map_err(in_words)?;
    driver.release(chunk).map_err(in_words)?;
    tell("release_twice", driver.release(chunk));
    Ok((Answer::Figures, told))
}

/// What the library itself answers, past the books. In a process of its own, which may end by it: then the answers until there are what is known.
pub(super) fn answers_of_the_library(subject: &Subject) -> Found {
    let helper = Helper::start(subject.name, subject.device.id(), Role::Misuse, subject.granularity())?;
    let mut told = Map::new();
    loop {
        let said = match helper.hear() {
            Ok((said, _)) => said,
            Err(error) if told.is_empty() => return Err(error),
            Err(error) => {
                told.insert("what_comes_next".to_owned(), json!(error));
                break;
            }
        };
        match said["misuse"].as_str() {
            Some(misuse) => told.insert(misuse.to_owned(), said["answer"].clone()),
            None if told.is_empty() => return Err("there is no library behind this driver".to_owned()),
            None => break,
        };
    }
    Ok((Answer::Figures, told))
}

/// What should not have been given is given back.
fn made(driver: &dyn Driver, outcome: Result<crate::driver::Handle, DriverError>) -> Result<(), DriverError> {
    outcome.and_then(|handle| driver.release(handle))
}
