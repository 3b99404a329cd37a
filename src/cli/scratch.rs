//! Directories for what lasts as long as a command.

use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

/// Names that are tried.
const TRIES: u32 = 1000;

/// Makes an empty directory of this user alone where the system has temporary files (TMPDIR says where). Whoever asked for it removes it.
///
/// # Errors
///
/// What the system says, with the path.
pub(super) fn directory(name: &str) -> std::io::Result<PathBuf> {
    let base = std::env::temp_dir();
    for n in 0..TRIES {
        let directory = base.join(format!("{name}-{}-{n}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&directory) {
            Ok(()) => return Ok(directory),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                let words = format!("creating {} (TMPDIR says where): {error}", directory.display());
                return Err(std::io::Error::new(error.kind(), words));
            }
        }
    }
    Err(std::io::Error::other(format!("no free name for {name} in {}", base.display())))
}
