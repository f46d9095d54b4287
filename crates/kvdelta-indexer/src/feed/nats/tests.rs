use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{Credentials, NatsFeed, Scope};
use crate::feed::{FeedId, Frame, Limits, Outlet, RecoverError, Signal, Source, queue};
use crate::ids::WorkerRank;

/// Against hanging; no test expects it to pass.
const FOREVER: Duration = Duration::from_secs(60);

/// As much of a broker as a subscriber meets; the real one is in `cargo xtask test`.
struct Broker {
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    to: OwnedWriteHalf,
    subscribed: Option<(String, String)>,
}

impl Broker {
    async fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = timeout(FOREVER, listener.accept()).await.unwrap().unwrap();
        let (from, mut to) = TcpStream::into_split(stream);
        let info = "INFO {\"server_id\":\"x\",\"version\":\"2.9.10\",\"max_payload\":1048576}\r\n";
        to.write_all(info.as_bytes()).await.unwrap();
        let mut broker = Self {
            lines: BufReader::new(from).lines(),
            to,
            subscribed: None,
        };
        while broker.subscribed.is_none() {
            broker.serve_line().await;
        }
        broker
    }

    async fn serve_line(&mut self) {
        let line = timeout(FOREVER, self.lines.next_line()).await.unwrap();
        let line = line.unwrap().expect("the feed stays");
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["PING"] => self.to.write_all(b"PONG\r\n").await.unwrap(),
            ["SUB", subject, sid] => self.subscribed = Some((subject.to_owned(), sid.to_owned())),
            _ => {}
        }
    }

    async fn send(&mut self, payload: &[u8]) {
        let (subject, sid) = self.subscribed.clone().unwrap();
        let head = format!("MSG {subject} {sid} {}\r\n", payload.len());
        let message = [head.as_bytes(), payload, b"\r\n"].concat();
        self.to.write_all(&message).await.unwrap();
    }

    /// Serves without an end.
    fn serve(mut self) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move {
            while let Ok(Some(line)) = self.lines.next_line().await {
                if line == "PING" && self.to.write_all(b"PONG\r\n").await.is_err() {
                    return;
                }
            }
        })
    }
}

fn listen(at: &str, limits: Limits) -> Outlet {
    let scope = Scope {
        namespace: Some("dynamo".to_owned()),
        component: Some("back end.1".to_owned()),
        endpoint: None,
    };
    let (inlet, outlet) = queue(limits);
    let source = NatsFeed::new(at, Credentials::None, &scope, None);
    tokio::spawn(async move {
        let tap = inlet.tap(FeedId(0));
        drop(inlet);
        source.listen(tap).await;
    });
    outlet
}

async fn next(outlet: &mut Outlet) -> Signal {
    timeout(FOREVER, outlet.next())
        .await
        .unwrap()
        .unwrap()
        .signal
}

fn envelope(bytes: &'static [u8]) -> Signal {
    let envelope = Bytes::from_static(bytes);
    Signal::Frame(Frame::Dynamo { envelope })
}

#[tokio::test]
async fn a_broker_that_comes_back_is_subscribed_to_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let mut outlet = listen(&at, Limits::default());
    for life in 0..2 {
        let mut broker = Broker::accept(&listener).await;
        let subject = "namespace.dynamo.component.back%20end%2E1.endpoint.*.kv-events";
        assert_eq!(broker.subscribed.as_ref().unwrap().0, subject);
        broker.send(b"one").await;
        broker.send(b"").await;
        let serving = broker.serve();
        let mut told = Vec::new();
        while told.len() < 3 {
            told.push(next(&mut outlet).await);
        }
        // Coming back, messages may overtake the word that the connection stands.
        for signal in [Signal::Connected, envelope(b"one"), envelope(b"")] {
            assert!(told.contains(&signal), "life {life}: {told:?}");
        }
        serving.abort();
        assert_eq!(next(&mut outlet).await, Signal::Disconnected);
    }
}

#[tokio::test]
async fn a_broker_that_is_not_there_yet_is_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut outlet = listen(&at, Limits::default());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let listener = TcpListener::bind(&at).await.unwrap();
    let broker = Broker::accept(&listener).await;
    let _serving = broker.serve();
    assert_eq!(next(&mut outlet).await, Signal::Connected);
}

#[tokio::test]
async fn without_local_indexers_nothing_can_be_asked_for() {
    let feed = NatsFeed::new(
        "nats://127.0.0.1:1",
        Credentials::None,
        &Scope::default(),
        None,
    );
    let of = WorkerRank::new(1, 0);
    let error = feed.dump(of).await.unwrap_err();
    assert_eq!(error, RecoverError::NotOffered { of, what: "dump" });
    assert!(!feed.link().dumps && !feed.link().replays);
    assert_eq!(
        Scope::default().subject(),
        "namespace.*.component.*.endpoint.*.kv-events"
    );
}

#[test]
fn passwords_are_not_shown() {
    let user = Credentials::User("u".to_owned(), "secret".to_owned());
    let feed = NatsFeed::new(
        "nats://u:secret@host:4222",
        user.clone(),
        &Scope::default(),
        None,
    );
    let shown = format!("{feed:?} {user:?} {}", feed.name());
    assert!(
        shown.contains("host:4222") && !shown.contains("secret"),
        "{shown}"
    );
}
