//! The file that a trace is to be written to: in what form, and not over what is read.

use std::path::Path;

use crate::cli::{Failure, whole_file};
use crate::trace::Trace;
use crate::trace::export::Form;

/// Where a trace is to be written.
#[derive(Debug)]
pub(super) struct Target<'a> {
    path: &'a Path,
    form: Form,
}

impl<'a> Target<'a> {
    /// Checks before any work is done that there is such a form, and that the file is not `input`, under whatever name.
    pub(super) fn of(path: &'a Path, input: &Path) -> Result<Target<'a>, Failure> {
        let form = Form::of(path)
            .ok_or_else(|| Failure::Usage(format!("{}: a trace is written to {}", path.display(), Form::ENDINGS)))?;
        whole_file::is_not(path, input)?;
        Ok(Target { path, form })
    }

    pub(super) fn path(&self) -> &Path {
        self.path
    }

    /// Writes the trace, and says how many bytes it has become.
    pub(super) fn write(&self, trace: &Trace) -> Result<u64, Failure> {
        whole_file::write(self.path, |file| self.form.write(file, trace))
    }
}
