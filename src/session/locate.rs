//! Where the daemon is: the one place of the client that reads the environment.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::driver::LibraryPlace;

/// The name of the gRPC socket in a runtime directory.
pub const SOCKET_NAME: &str = "stitchd.sock";
/// The runtime directory when nobody names another.
pub const RUNTIME_DIR: &str = "/run/stitchd";

/// What the environment says, as far as the client cares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `STITCHD_SOCKET`: the socket itself.
    pub socket: Option<OsString>,
    /// `NVIDIA_DRA_LOCAL_IPC_DIR`: set by Kubernetes where containers share a claim.
    pub dra_directory: Option<OsString>,
    /// `STITCHD_RUNTIME_DIR`: the directory of the socket.
    pub runtime_dir: Option<OsString>,
    /// `STITCHD_PLAN`: a plan file to serve from.
    pub plan: Option<OsString>,
    /// `STITCHD_DRIVER_LIBRARY`, read in tests only: the library that stands for the vendor's.
    pub library: LibraryPlace,
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
            #[cfg(feature = "testing")]
            library: read("STITCHD_DRIVER_LIBRARY").map(LibraryPlace::at).unwrap_or_default(),
            #[cfg(not(feature = "testing"))]
            library: LibraryPlace::default(),
        }
    }

    /// The daemon's gRPC socket.
    pub fn socket(&self) -> PathBuf {
        if let Some(socket) = &self.socket {
            return PathBuf::from(socket);
        }
        let directory = self.dra_directory.as_ref().or(self.runtime_dir.as_ref());
        directory.map_or_else(|| PathBuf::from(RUNTIME_DIR), PathBuf::from).join(SOCKET_NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
