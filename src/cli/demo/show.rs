//! What the audience sees: sentences and progress bars on standard error, or nothing but the result.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Standard error, as far as people look at it.
#[derive(Debug)]
pub(super) struct Show {
    bars: MultiProgress,
    is_quiet: bool,
}

impl Show {
    pub(super) fn new(is_quiet: bool) -> Show {
        Show { bars: MultiProgress::new(), is_quiet }
    }

    /// A sentence, above the bars.
    pub(super) fn say(&self, line: &str) {
        if !self.is_quiet {
            // Where standard error is no terminal there are no bars to stay above.
            let is_shown = !self.bars.is_hidden() && self.bars.println(line).is_ok();
            if !is_shown {
                eprintln!("{line}");
            }
        }
    }

    /// A bar for one process.
    pub(super) fn bar(&self, name: &str) -> ProgressBar {
        let style = ProgressStyle::with_template("{prefix:16} [{bar:32}] {percent:>3} %  {msg}")
            .expect("the template is right")
            .progress_chars("=> ");
        let bar = if self.is_quiet { ProgressBar::hidden() } else { self.bars.add(ProgressBar::new(1)) };
        bar.with_style(style).with_prefix(name.to_owned())
    }
}
