//! A file that is written whole or not at all.
//!
//! Invariant: whatever fails, the file is as it was before, and nothing is left beside it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::{Failure, file_error};

/// Refuses to write over the file that is read, under whatever name.
pub(super) fn is_not(path: &Path, input: &Path) -> Result<(), Failure> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    if identity(path).is_some_and(|out| identity(input) == Some(out)) {
        return Err(Failure::Usage(format!("{} is the file that is read; write to another", path.display())));
    }
    Ok(())
}

/// Has `write` fill a file beside `path`, and gives it that name when it is whole. Says how many bytes it has.
pub(super) fn write(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<u64, Failure> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // In the same directory, so that it only has to be given its own name.
    let beside = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let written = File::create_new(&beside).and_then(|file| {
        write(&file)?;
        file.sync_all()?;
        let len = file.metadata()?.len();
        fs::rename(&beside, path)?;
        Ok(len)
    });
    written.map_err(|error| {
        // What is there already is another's.
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = fs::remove_file(&beside);
        }
        file_error(path)(io::Error::new(error.kind(), format!("it cannot be written: {error}")))
    })
}
