//! A terminal for a while: its other screen, keys as they are pressed, and all of that undone at the end.

use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

/// What somebody wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Letter(char),
    Up,
    Down,
    /// It is to end: by key, by signal, or nobody is there any more.
    End,
    Resized,
    Other,
}

/// The other screen (xterm's private mode 1049), no cursor.
const BEGIN: &str = "\x1b[?1049h\x1b[?25l";
const END: &str = "\x1b[?25h\x1b[?1049l";

#[derive(Debug)]
pub(super) struct Terminal {
    before: Termios,
    keys: mpsc::Receiver<Key>,
    terminate: Signal,
    hang_up: Signal,
    resize: Signal,
}

impl Terminal {
    /// Both ends of this process are one.
    pub(super) fn is_there() -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    pub(super) fn begin() -> io::Result<Terminal> {
        let before = tcgetattr(io::stdin())?;
        let terminal = Terminal {
            before: before.clone(),
            keys: read_keys(),
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
            resize: signal(SignalKind::window_change())?,
        };
        let mut raw = before;
        raw.make_raw();
        // From here on whatever happens is undone when this is dropped.
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        terminal.write(BEGIN)?;
        Ok(terminal)
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Columns and rows.
    pub(super) fn size(&self) -> (usize, usize) {
        let size = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        size.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
    }

    /// Shows these lines and nothing else.
    pub(super) fn show(&mut self, lines: &[String]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            if at > 0 {
                text.push_str("\r\n");
            }
            text.push_str(line);
            // What was there of a longer one.
            text.push_str("\x1b[0m\x1b[K");
        }
        text.push_str("\x1b[J");
        self.write(&text)
    }

    /// Waits for the next.
    pub(super) async fn key(&mut self) -> Key {
        tokio::select! {
            _ = self.terminate.recv() => Key::End,
            _ = self.hang_up.recv() => Key::End,
            _ = self.resize.recv() => Key::Resized,
            key = self.keys.recv() => key.unwrap_or(Key::End),
        }
    }
}

/// Has a thread read keys: it waits for one until this process ends, which does not wait for it.
fn read_keys() -> mpsc::Receiver<Key> {
    const UNREAD: usize = 16;
    let (send, keys) = mpsc::channel(UNREAD);
    std::thread::spawn(move || {
        loop {
            let mut bytes = [0; 64];
            // A terminal that is gone has no keys any more.
            let len = match rustix::io::read(io::stdin().as_fd(), &mut bytes) {
                Err(rustix::io::Errno::INTR) => continue,
                read => read.unwrap_or(0),
            };
            for key in keys_of(&bytes[..len]) {
                if send.blocking_send(key).is_err() || key == Key::End {
                    return;
                }
            }
        }
    });
    keys
}

/// What a terminal sends for keys: one character each, or a sequence; several where they are pressed fast.
fn keys_of(bytes: &[u8]) -> Vec<Key> {
    // Escape by itself, and nobody there.
    if matches!(bytes, [] | [0x1b]) {
        return vec![Key::End];
    }
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        let (key, next) = match (first, after) {
            (0x1b, [b'[' | b'O', b'A', next @ ..]) => (Key::Up, next),
            (0x1b, [b'[' | b'O', b'B', next @ ..]) => (Key::Down, next),
            // Of any other key: up to its last, which is a letter or a tilde.
            (0x1b, _) => {
                let len = after.iter().skip(1).position(|byte| byte.is_ascii_alphabetic() || *byte == b'~');
                (Key::Other, len.map_or(&[][..], |len| &after[len + 2..]))
            }
            // Ctrl-C and Ctrl-D.
            (3 | 4, next) => (Key::End, next),
            (b'k', next) => (Key::Up, next),
            (b'j', next) => (Key::Down, next),
            (letter, next) if letter.is_ascii_graphic() || *letter == b' ' => (Key::Letter(char::from(*letter)), next),
            (_, next) => (Key::Other, next),
        };
        keys.push(key);
        rest = next;
    }
    keys
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Where it is gone there is nothing to undo.
        let _ = self.write(END);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_what_terminals_send() {
        for (bytes, keys) in [
            (&b"q"[..], &[Key::Letter('q')][..]),
            (b" ", &[Key::Letter(' ')]),
            (b"\x1b[A", &[Key::Up]),
            (b"\x1bOB", &[Key::Down]),
            (b"\x03", &[Key::End]),
            (b"", &[Key::End]),
            (b"\x1b", &[Key::End]),
            (b"\x1b[5~", &[Key::Other]),
            (b"\x1b[", &[Key::Other]),
            ("ü".as_bytes(), &[Key::Other, Key::Other]),
            (
                b"h\x1b[B\x1b[1;5Cj q",
                &[Key::Letter('h'), Key::Down, Key::Other, Key::Down, Key::Letter(' '), Key::Letter('q')],
            ),
        ] {
            assert_eq!(keys_of(bytes), keys, "{bytes:?}");
        }
    }
}
