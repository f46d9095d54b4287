//! Dynamo's event plane over NATS.
//!
//! A worker's publisher sends envelopes to the subject of its endpoint; one subscription with wildcards
//! hears all workers of a namespace (`dynamo-runtime`, `EventScope::subject`, `nats_transport.rs`). NATS
//! keeps nothing: what was sent while nobody listened comes back only from the workers' local indexers.
//! The broker answers for no worker, so a connection to it is no sign of a worker's life.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, Message, Subscriber};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::feed::source::Recovery;
use crate::feed::{Answer, Frame, LocalIndexers, Origin, RecoverError, Signal, Source, Tap};
use crate::ids::WorkerRank;
use crate::ingest::Link;

/// The topic of Dynamo's KV events (`dynamo-kv-router`, `KV_EVENT_SUBJECT`).
const TOPIC: &str = "kv-events";
/// Messages that the client keeps for the reader, which is always there.
const READ_AHEAD: usize = 1024;
/// The client gives a broker up that misses two of these.
const PING: Duration = Duration::from_secs(5);
const CONNECT: Duration = Duration::from_secs(5);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(4);

/// Whose events are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    /// Dynamo's namespace; `None`: all.
    pub namespace: Option<String>,
    /// The component in it, as `backend` or `prefill`; `None`: all.
    pub component: Option<String>,
    /// The endpoint of the component; `None`: all.
    pub endpoint: Option<String>,
}

impl Scope {
    /// The subject to subscribe to.
    pub fn subject(&self) -> String {
        let [namespace, component, endpoint] = [&self.namespace, &self.component, &self.endpoint]
            .map(|name| match name {
                Some(name) => encoded(name),
                None => "*".to_owned(),
            });
        format!("namespace.{namespace}.component.{component}.endpoint.{endpoint}.{TOPIC}")
    }
}

/// A name as one part of a subject: what is no letter, digit, `-` or `_` as `%` and two digits.
fn encoded(name: &str) -> String {
    let parts = name.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    });
    parts.collect()
}

/// What the broker wants to see.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// Nothing, or what stands in its address.
    #[default]
    None,
    /// A user and a password.
    User(String, String),
    /// A token.
    Token(String),
    /// A file of the kind that `nsc` writes.
    File(PathBuf),
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::None => "none",
            Self::User(..) => "user",
            Self::Token(_) => "token",
            Self::File(_) => "file",
        })
    }
}

/// The KV events of all workers in a scope.
#[derive(Clone)]
pub struct NatsFeed {
    server: String,
    /// The server without what stands before its host.
    shown: String,
    credentials: Credentials,
    subject: String,
    recovery: Recovery,
}

impl NatsFeed {
    /// A feed of the events in `scope` from the broker at `server` (as in Dynamo's `NATS_SERVER`).
    pub fn new(
        server: &str,
        credentials: Credentials,
        scope: &Scope,
        local: Option<Arc<dyn LocalIndexers>>,
    ) -> Self {
        let shown = server.rsplit_once('@').map_or(server, |(_, host)| host);
        Self {
            server: server.to_owned(),
            shown: shown.to_owned(),
            credentials,
            subject: scope.subject(),
            recovery: Recovery(local),
        }
    }

    async fn connect(&self, events: mpsc::Sender<Event>) -> Result<Subscription, String> {
        let options = ConnectOptions::new()
            .name("kvdelta")
            .connection_timeout(CONNECT)
            .ping_interval(PING)
            .subscription_capacity(READ_AHEAD)
            .event_callback(move |event| {
                let events = events.clone();
                // The channel is read all the time; if it is full all the same, a loss among what is
                // told stands already.
                async move { drop(events.try_send(event)) }
            });
        let options = match &self.credentials {
            Credentials::None => options,
            Credentials::User(user, password) => {
                options.user_and_password(user.clone(), password.clone())
            }
            Credentials::Token(token) => options.token(token.clone()),
            Credentials::File(path) => {
                let read = options.credentials_file(path).await;
                read.map_err(|error| format!("{}: {error}", path.display()))?
            }
        };
        let client = options.connect(&self.server).await;
        let client = client.map_err(|error| error.to_string())?;
        let subscriber = client.subscribe(self.subject.clone()).await;
        let subscriber = subscriber.map_err(|error| error.to_string())?;
        // What is sent from now on must not be missed.
        client.flush().await.map_err(|error| error.to_string())?;
        Ok(Subscription { client, subscriber })
    }

    async fn run(&self, mut tap: Tap) {
        let mut wait = FIRST_WAIT;
        loop {
            let (events, heard) = mpsc::channel(256);
            let connected = tokio::select! {
                connected = self.connect(events) => connected,
                () = tap.closed() => return,
            };
            match connected {
                Ok(subscription) => {
                    wait = FIRST_WAIT;
                    tracing::info!(server = %self.shown, subject = %self.subject, "subscribed to KV events");
                    let listened = tap.tell(Signal::Connected).await
                        && self.hear(subscription, heard, &mut tap).await
                        && tap.tell(Signal::Disconnected).await;
                    if !listened {
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(server = %self.shown, error, ?wait, "no NATS broker for KV events");
                }
            }
            tokio::select! {
                () = sleep(wait) => wait = (wait * 2).min(LONGEST_WAIT),
                () = tap.closed() => return,
            }
        }
    }

    /// Hands on what comes until the client gives up; `false`: nobody listens any more.
    async fn hear(
        &self,
        mut subscription: Subscription,
        mut heard: mpsc::Receiver<Event>,
        tap: &mut Tap,
    ) -> bool {
        // The client's own first event may have come or not.
        let mut is_up = true;
        loop {
            let listened = tokio::select! {
                biased;
                Some(event) = heard.recv() => match event {
                    Event::Connected if !is_up => {
                        is_up = true;
                        // Its subscriptions are sent anew before anything else.
                        let flushed = subscription.client.flush().await;
                        tracing::info!(server = %self.shown, ok = flushed.is_ok(), "NATS is back");
                        tap.tell(Signal::Connected).await
                    }
                    Event::Disconnected => {
                        is_up = false;
                        tracing::warn!(server = %self.shown, "lost the NATS broker of KV events");
                        tap.tell(Signal::Disconnected).await
                    }
                    Event::SlowConsumer(_) => {
                        tap.lost();
                        true
                    }
                    other => {
                        tracing::debug!(server = %self.shown, %other, "NATS");
                        true
                    }
                },
                message = subscription.subscriber.next() => match message {
                    Some(Message { payload, .. }) => {
                        tap.offer(Frame::Dynamo { envelope: payload });
                        true
                    }
                    None => return true,
                },
                listened = tap.tell_dropped() => listened,
            };
            if !listened {
                return false;
            }
        }
    }
}

impl std::fmt::Debug for NatsFeed {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("NatsFeed").field(&self.name()).finish()
    }
}

struct Subscription {
    client: Client,
    subscriber: Subscriber,
}

impl Source for NatsFeed {
    fn name(&self) -> String {
        format!("{} at {}", self.subject, self.shown)
    }

    fn origin(&self) -> Origin {
        Origin::All
    }

    fn link(&self) -> Link {
        self.recovery.link()
    }

    fn listen(&self, tap: Tap) -> BoxFuture<'_, ()> {
        Box::pin(self.run(tap))
    }

    fn replay(&self, of: WorkerRank, from_seq: u64) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(self.recovery.ask(of, Some(from_seq), "replay"))
    }

    fn dump(&self, of: WorkerRank) -> BoxFuture<'_, Result<Answer, RecoverError>> {
        Box::pin(self.recovery.ask(of, None, "dump"))
    }
}

#[cfg(test)]
mod tests;
