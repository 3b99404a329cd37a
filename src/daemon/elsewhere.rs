//! What a daemon before has left where this one, whose state directory is another, would not look for it.
//!
//! Not for: what it has left in the directory of both ([`super::takeover`]).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use super::config::Config;
use super::{DaemonError, kept_in};

/// The file of the runtime directory that says where the state directory of the daemon is, if it is another.
const STATE_DIR_FILE: &str = "state_dir";

/// A daemon before that had another state directory, or none of its own, has left what it holds where nobody would look for it.
pub(super) fn check(config: &Config) -> Result<(), DaemonError> {
    let note = config.runtime_dir.join(STATE_DIR_FILE);
    let before = std::fs::read(&note).ok().map(|path| PathBuf::from(OsString::from_vec(path)));
    // A directory that is gone has no keeper.
    let before = before.filter(|before| before.is_absolute() && before.is_dir());
    for there in before.into_iter().chain([config.runtime_dir.clone()]) {
        if !is_same(&there, config.state_dir()) {
            check_left_in(&there, config)?;
        }
    }
    let noted = if is_same(config.state_dir(), &config.runtime_dir) {
        let is_none = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        std::fs::remove_file(&note).or_else(|error| if is_none(&error) { Ok(()) } else { Err(error) })
    } else {
        let absolute = std::path::absolute(config.state_dir());
        absolute.and_then(|path| std::fs::write(&note, path.as_os_str().as_bytes()))
    };
    if let Err(error) = noted {
        tracing::warn!(%error, file = %note.display(), "the next daemon cannot be told where the state directory is; give it the same");
    }
    Ok(())
}

/// Whatever they are called.
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    real(one) == real(other)
}

/// What a daemon before has left in a directory that is not this one's: in the way where living processes need it, and over otherwise.
fn check_left_in(there: &Path, config: &Config) -> Result<(), DaemonError> {
    let Some((link, held, processes)) = kept_in(there)? else { return Ok(()) };
    if processes > 0 {
        let (pid, state_dir) = (link.pid(), config.state_dir().to_owned());
        return Err(DaemonError::Elsewhere { pid, there: there.to_owned(), state_dir, processes });
    }
    tracing::warn!(
        pid = link.pid(),
        descriptors = held,
        "a keeper in another state directory holds what a daemon before had, for no process any more: it ends"
    );
    link.end().map_err(DaemonError::Keeper)
}
