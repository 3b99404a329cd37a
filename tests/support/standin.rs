//! Pretended machines with GPUs: a directory with a copy of the stand-in library (tests/standin-driver), so that each test has a machine of its own.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use stitchd::driver::gpu::GpuKind;

/// A machine. It goes with the directory.
pub(crate) struct Machine {
    directory: TempDir,
    library: PathBuf,
}

impl Machine {
    /// A machine of this vendor, with these lines in its `machine.conf`.
    pub(crate) fn new(kind: GpuKind, conf: &str) -> Machine {
        let driver = match kind {
            GpuKind::Cuda => "cuda",
            GpuKind::Hip => "hip",
        };
        let name = &format!("libstandin_{driver}.so");
        // Dependencies of a test are built beside it.
        let built = std::env::current_exe().unwrap().with_file_name(name);
        let directory = TempDir::with_prefix("machine-").unwrap();
        let library = directory.path().join(name);
        std::fs::copy(&built, &library).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        std::fs::write(directory.path().join("machine.conf"), conf).unwrap();
        Machine { directory, library }
    }

    pub(crate) fn library(&self) -> &Path {
        &self.library
    }

    /// Chunks that exist in whatever process.
    pub(crate) fn chunk_files(&self) -> usize {
        let entries = std::fs::read_dir(self.directory.path()).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("chunk-")).count()
    }
}
