//! Traces into files: the form by the ending of a name.

use std::io::{BufWriter, Write};
use std::path::Path;

use super::{Trace, binary, csv};

/// How a file of traces is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Form {
    is_binary: bool,
    packing: Packing,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Packing {
    Plain,
    Zstd,
    Gzip,
}

impl Form {
    /// Every ending that means something.
    pub const ENDINGS: &str = ".csv, .csv.zst, .csv.gz, .stitchtrace, .stitchtrace.zst, .stitchtrace.gz";

    /// The form that the ending of `path` asks for; none if it is none of [`Form::ENDINGS`].
    pub fn of(path: &Path) -> Option<Form> {
        let name = path.file_name()?.to_str()?;
        let packings = [(".zst", Packing::Zstd), (".gz", Packing::Gzip)];
        let packed = packings.iter().find_map(|(ending, packing)| Some((name.strip_suffix(ending)?, *packing)));
        let (name, packing) = packed.unwrap_or((name, Packing::Plain));
        let is_binary = name.ends_with(".stitchtrace");
        (is_binary || name.ends_with(".csv")).then_some(Form { is_binary, packing })
    }

    /// Writes the trace.
    ///
    /// # Errors
    ///
    /// What `out` says; what [`binary::Writer::push`] refuses.
    pub fn write(self, out: impl Write, trace: &Trace) -> std::io::Result<()> {
        // Slow enough to find what repeats, fast enough not to be waited for.
        const LEVEL: i32 = 9;
        match self.packing {
            Packing::Plain => self.write_plain(&mut BufWriter::new(out), trace),
            Packing::Zstd => {
                let mut encoder = zstd::stream::Encoder::new(out, LEVEL)?;
                encoder.include_checksum(true)?;
                self.write_plain(&mut encoder, trace)?;
                encoder.finish()?.flush()
            }
            Packing::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(out, flate2::Compression::default());
                self.write_plain(&mut encoder, trace)?;
                encoder.finish()?.flush()
            }
        }
    }

    fn write_plain(self, out: &mut impl Write, trace: &Trace) -> std::io::Result<()> {
        if self.is_binary { binary::write(out, trace) } else { csv::write(out, trace) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::import;

    #[test]
    fn a_real_trace_reads_back_from_every_form_as_it_was() {
        let path = format!("{}/tests/data/resnet50-olla.csv.zst", env!("CARGO_MANIFEST_DIR"));
        let trace = csv::read_file(path.as_ref()).unwrap();
        for ending in Form::ENDINGS.split(", ") {
            let form = Form::of(format!("some.where/a{ending}").as_ref()).unwrap();
            let mut bytes = Vec::new();
            form.write(&mut bytes, &trace).unwrap();
            let again = import::read(&bytes[..]).unwrap().trace;
            assert_eq!((again.events, again.modules), (trace.events.clone(), trace.modules.clone()), "{ending}");
        }
        for name in ["a", "csv", "a.zst", "a.pickle", "a.csv.xz", ".."] {
            assert_eq!(Form::of(name.as_ref()), None, "{name}");
        }
    }
}
