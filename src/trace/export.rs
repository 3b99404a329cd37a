//! Traces into files: the form by the ending of a name.

use std::io::{BufWriter, Write};
use std::path::Path;

use super::unpack::Growth;
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
    /// What `out` says; what [`binary::Writer::push`] refuses; and a trace that shrinks so much that its readers would refuse it.
    pub fn write(self, out: impl Write, trace: &Trace) -> std::io::Result<()> {
        // Slow enough to find what repeats, fast enough not to be waited for.
        const LEVEL: i32 = 9;
        match self.packing {
            Packing::Plain => self.write_plain(&mut BufWriter::new(out), trace),
            Packing::Zstd => {
                let mut encoder = zstd::stream::Encoder::new(Counted::over(out), LEVEL)?;
                encoder.include_checksum(true)?;
                let mut plain = Counted::over(encoder);
                self.write_plain(&mut plain, trace)?;
                let len = plain.len;
                self.check_growth(len, plain.out.finish()?)
            }
            Packing::Gzip => {
                let encoder = flate2::write::GzEncoder::new(Counted::over(out), flate2::Compression::default());
                let mut plain = Counted::over(encoder);
                self.write_plain(&mut plain, trace)?;
                let len = plain.len;
                self.check_growth(len, plain.out.finish()?)
            }
        }
    }

    /// Refuses what readers would take for a bomb.
    fn check_growth(self, plain: u64, mut packed: Counted<impl Write>) -> std::io::Result<()> {
        let growth = if self.is_binary { Growth::CODES } else { Growth::ROWS };
        if plain > growth.free.saturating_add(growth.times.saturating_mul(packed.len)) {
            let text = format!(
                "it repeats itself so much that {plain} bytes shrink to {}, which no reader takes; write it without .zst or .gz",
                packed.len
            );
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        packed.flush()
    }

    fn write_plain(self, out: &mut impl Write, trace: &Trace) -> std::io::Result<()> {
        if self.is_binary { binary::write(out, trace) } else { csv::write(out, trace) }
    }
}

/// Counts what goes through.
struct Counted<W> {
    out: W,
    len: u64,
}

impl<W> Counted<W> {
    fn over(out: W) -> Counted<W> {
        Counted { out, len: 0 }
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::import;

    #[test]
    fn what_no_reader_would_take_is_not_written() {
        let pair = |n: u64| {
            let event = format!("{n},alloc,{n},512\n{n},free,{n},\n");
            event.into_bytes()
        };
        let text: Vec<u8> = b"tick,event,id,bytes\n".iter().copied().chain((0..1_500_000).flat_map(pair)).collect();
        let trace = import::read(&text[..]).unwrap().trace;
        for ending in [".stitchtrace.zst", ".stitchtrace.gz"] {
            let form = Form::of(format!("a{ending}").as_ref()).unwrap();
            let mut bytes = Vec::new();
            let written = form.write(&mut bytes, &trace);
            // Whatever is written can be read, and what cannot be is not.
            assert_eq!(written.is_ok(), import::read(&bytes[..]).is_ok(), "{ending}: {written:?}");
            assert!(written.unwrap_err().to_string().contains("write it without .zst or .gz"), "{ending}");
        }
        let mut plain = Vec::new();
        Form::of("a.stitchtrace".as_ref()).unwrap().write(&mut plain, &trace).unwrap();
        assert_eq!(import::read(&plain[..]).unwrap().trace.events.len(), trace.events.len());
    }

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
