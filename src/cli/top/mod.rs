//! `stitchd top`: a running daemon, live in the terminal.
//!
//! | part | what it does |
//! |---|---|
//! | [`screen`] | what is shown, as lines |
//! | [`terminal`] | a terminal that is as it was before when this ends, however it ends |

mod screen;
mod terminal;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tonic::transport::Channel;

use super::{Common, DONE, Failure, Outcome, ask, print_json};
use crate::daemon::live::json as show;
use crate::session::{SessionError, dial};
use crate::wire::v1;
use crate::wire::v1::admin_client::AdminClient;
use screen::{Sort, View};
use terminal::{Key, Terminal};

/// A daemon that takes longer for an answer is shown as one that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  stitchd top                       # live; h for keys\n  stitchd top --once                # one look, for a script or a report\n  stitchd top --json | jq .waiting  # the same as data\n  stitchd top --once --map train-7  # where the memory of that session lies\n\nKeys: q quits; m shows where the memory of the first session of the list lies; l, u, a, n, r, f sort by leased, in use, age, name, requests, failures (again: the other way round); space stops and goes on; arrows move the list of sessions."
)]
pub(super) struct TopArgs {
    #[command(flatten)]
    common: Common,
    /// How often it looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = super::time)]
    every: Duration,
    /// Print what there is once, and end: also where this is no terminal
    #[arg(long)]
    once: bool,
    /// Show where the memory of this session lies: its number, or its name
    #[arg(long, value_name = "SESSION")]
    map: Option<String>,
}

pub(super) fn run(args: &TopArgs) -> Outcome {
    let socket = args.common.socket();
    let look =
        async |channel| AdminClient::new(channel).max_decoding_message_size(LEN_MAX).live(v1::LiveRequest {}).await;
    let mapped = match &args.map {
        Some(session) => Some(ask::session(&ask::status(&socket)?, session)?.session_id),
        None => None,
    };
    let look_at = |session_id| {
        let request = v1::AddressMapRequest { session_id };
        let map =
            ask::ask(&socket, Duration::ZERO, async |channel| AdminClient::new(channel).address_map(request).await)?;
        Ok::<_, Failure>((session_id, map))
    };
    if args.common.json {
        let shown = match mapped.map(look_at).transpose()? {
            Some((session, map)) => show::address_map(session, &map),
            None => {
                let mut live = ask::ask(&socket, Duration::ZERO, look)?;
                let sessions = live.status.as_mut().map(|status| std::mem::take(&mut status.sessions));
                json!(show::live(&live, show::Sessions::of(sessions.unwrap_or_default())))
            }
        };
        print_json(&shown);
        return DONE;
    }
    if args.once || !Terminal::is_there() {
        const COLUMNS: usize = 160;
        let live = ask::ask(&socket, Duration::ZERO, look)?;
        let map = mapped.map(look_at).transpose()?;
        let view = View { columns: COLUMNS, rows: usize::MAX, is_colored: false, map, ..View::default() };
        screen::lines(&live, &view).iter().for_each(|line| outln!("{line}"));
        return DONE;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Other(error.into()))?;
    runtime.block_on(async {
        // Where there is no daemon that is said as of every other command, and not on a screen that is gone at once.
        let channel = dial(&socket).await.map_err(Failure::from)?;
        let mut client = AdminClient::new(channel).max_decoding_message_size(LEN_MAX);
        let first = tokio::time::timeout(PATIENCE, client.live(v1::LiveRequest {})).await;
        let first = match first {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(Failure::from(SessionError::no_daemon(&socket, status.message()))),
            Err(_) => return Err(Failure::from(SessionError::no_answer(&socket))),
        };
        let terminal = Terminal::begin().map_err(|error| Failure::Other(error.into()))?;
        let map = mapped.map(|session| (session, v1::AddressMapReply::default()));
        watch(client, first, terminal, args.every.max(Duration::from_millis(100)), map).await
    })
}

/// A node of hundreds of sessions is some hundred kilobytes.
const LEN_MAX: usize = 64 << 20;

async fn watch(
    mut client: AdminClient<Channel>,
    first: v1::LiveReply,
    mut terminal: Terminal,
    every: Duration,
    map: Option<(u64, v1::AddressMapReply)>,
) -> Outcome {
    let mut view = View { is_colored: true, map, ..View::default() };
    let mut live = first;
    let mut asked_map: Option<tokio::task::JoinHandle<(u64, v1::AddressMapReply)>> = None;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        (view.columns, view.rows) = terminal.size();
        terminal.show(&screen::lines(&live, &view)).map_err(|error| Failure::Other(error.into()))?;
        tokio::select! {
            _ = ticks.tick(), if !view.is_stopped => {
                let asked = tokio::time::timeout(PATIENCE, client.live(v1::LiveRequest {})).await;
                view.trouble = match asked {
                    Ok(Ok(reply)) => {
                        live = reply.into_inner();
                        None
                    }
                    Ok(Err(status)) => Some(format!("the daemon does not answer: {}", status.message())),
                    Err(_) => Some(format!("the daemon does not answer within {} s", PATIENCE.as_secs())),
                };
                if let (Some((session, _)), None) = (&view.map, &asked_map) {
                    asked_map = Some(tokio::spawn(ask_map(client.clone(), *session)));
                }
            }
            // Beside the rest: a session takes a second at most to answer, and keys are not to wait for it.
            Ok((session, reply)) = async { asked_map.as_mut().expect("it is asked for").await }, if asked_map.is_some() => {
                asked_map = None;
                if let Some((wanted, map)) = view.map.as_mut().filter(|(wanted, _)| *wanted == session) {
                    (*wanted, *map) = (session, reply);
                }
            }
            key = terminal.key() => match key {
                Key::End => return DONE,
                Key::Letter('q' | 'Q') => return DONE,
                Key::Letter(' ') => view.is_stopped = !view.is_stopped,
                Key::Letter('h' | '?') => view.is_helping = !view.is_helping,
                Key::Letter('m') => {
                    view.map = match view.map.take() {
                        None => screen::first_session(&live, &view).map(|session| (session, v1::AddressMapReply::default())),
                        Some(_) => None,
                    };
                    ticks.reset_immediately();
                }
                Key::Letter(letter) => view.sort_by(Sort::of(letter)),
                Key::Up => view.first = view.first.saturating_sub(1),
                Key::Down => view.first = (view.first + 1).min(sessions(&live).saturating_sub(1)),
                Key::Resized | Key::Other => {}
            }
        }
    }
}

/// Where a session's memory lies; nothing where it is over, or the daemon does not answer, which is said elsewhere.
async fn ask_map(mut client: AdminClient<Channel>, session: u64) -> (u64, v1::AddressMapReply) {
    let asked = client.address_map(v1::AddressMapRequest { session_id: session });
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(reply)) => (session, reply.into_inner()),
        _ => (session, v1::AddressMapReply::default()),
    }
}

fn sessions(live: &v1::LiveReply) -> usize {
    live.status.as_ref().map_or(0, |status| status.sessions.len())
}
