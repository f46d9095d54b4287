//! Cases of real faults, as sequences of values.

use std::time::Duration;

use crate::event::Change;
use crate::ids::{DpRank, EngineHash, WorkerId, WorkerRank};
use crate::ingest::model::{Payload, Room, SILENT, one, payload, removed, stored};
use crate::ingest::{Action, Frame, Limits, Link};
use crate::trust::{Reason, StaleClaim, Trust};

const W: WorkerRank = WorkerRank::new(7, 0);
const W1: WorkerRank = WorkerRank::new(7, 1);
const COMPLETE: (Trust, Option<Reason>) = (Trust::Complete, None);

fn holes(why: Reason) -> (Trust, Option<Reason>) {
    (Trust::MayHaveHoles, Some(why))
}

fn room(ranks: &[(u32, Link)]) -> Room {
    let mut room = Room::new(Limits::default());
    let ranks: Vec<_> = ranks
        .iter()
        .map(|(rank, link)| (DpRank(*rank), *link))
        .collect();
    room.ingest.admit(WorkerId(7), &ranks, room.now);
    room
}

/// Frame `seq` of life `life`, a block of its own.
fn block(life: u64, seq: u64) -> Payload {
    let token = u32::try_from(1000 * life + seq).unwrap();
    payload(W, life, &[stored(&[5000 + seq], None, &[token; 4])])
}

fn two_blocks() -> Change {
    stored(&[1, 2], None, &[1, 2, 3, 4, 5, 6, 7, 8])
}

const PROMPT: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// Frames 0 to 40 of the first life, `S([h1,h2])` among them.
fn forty(room: &mut Room) {
    for seq in 0..=40 {
        let told = if seq == 9 {
            payload(W, 1, &[two_blocks()])
        } else {
            block(1, seq)
        };
        let out = room.frame(W, seq, told);
        assert!(out.actions.is_empty());
    }
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.q(W, &PROMPT), 2);
}

#[test]
fn b02_an_unreadable_event_marks_the_worker_and_spares_its_neighbours() {
    let mut room = room(&[(0, Link::ZMQ)]);
    let mut told = payload(W, 1, &[two_blocks()]);
    told.batch.flaw = Some(Reason::Malformed);
    room.frame(W, 0, told);
    assert_eq!(room.q(W, &PROMPT), 2);
    assert_eq!(room.state(W), holes(Reason::Malformed));
    assert!(!room.trust.may_back_claim(W, room.now));
    room.frame(W, 1, block(1, 1));
    assert_eq!(
        room.state(W),
        holes(Reason::Malformed),
        "a good event does not heal it"
    );
    room.frame(W, 2, payload(W, 1, &[Change::Cleared]));
    assert_eq!(room.state(W), COMPLETE, "a clear does");
}

#[test]
fn b02_a_dump_heals_what_an_unreadable_event_hid() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    start_of_dynamo(&mut room);
    let mut told = payload(W, 1, &[]);
    told.batch.flaw = Some(Reason::Malformed);
    let out = room.frame(W, 10, told);
    let ticket = match out.actions[..] {
        [] => match one(&room.wait(Duration::from_secs(1))) {
            Action::Dump { ticket, .. } => ticket,
            other => panic!("{other:?}"),
        },
        [Action::Dump { ticket, .. }] => ticket,
        _ => panic!("{out:?}"),
    };
    room.ingest.dumped(
        W,
        ticket,
        vec![payload(W, 1, &[two_blocks()])],
        10,
        room.now,
    );
    assert_eq!(room.state(W), COMPLETE);
}

/// Ids 0 to 9 of Dynamo's event plane, the first of them by a dump.
fn start_of_dynamo(room: &mut Room) {
    let Action::Dump { ticket, .. } = one(&room.frame(W, 0, block(1, 0))) else {
        panic!("a stream that is met for the first time is asked for all");
    };
    room.ingest
        .dumped(W, ticket, vec![block(1, 0)], 0, room.now);
    for seq in 1..=9 {
        assert!(room.frame(W, seq, block(1, seq)).actions.is_empty());
    }
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn b04_one_dump_one_range_and_late_ids_ignored() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    start_of_dynamo(&mut room);
    let asked = one(&room.frame(W, 15, block(1, 15)));
    let Action::Replay {
        from_seq: 9,
        ticket,
        ..
    } = asked
    else {
        panic!("{asked:?}");
    };
    assert_eq!(room.state(W), holes(Reason::Recovering));
    // The worker can only answer with a dump.
    let three = (13..=15).map(|seq| block(1, seq)).collect();
    let out = room.ingest.dumped(W, ticket, three, 15, room.now);
    assert!(out.actions.is_empty(), "{out:?}");
    assert_eq!(room.trust.standing(W, room.now).unwrap().last_seq, Some(15));
    assert_eq!(room.index.held(W).len(), 3, "the dump replaces");
    for seq in [16, 17, 12] {
        assert!(room.frame(W, seq, block(1, seq)).actions.is_empty());
    }
    assert_eq!(room.index.held(W).len(), 5);
    assert_eq!(room.state(W), COMPLETE);
    let asked = one(&room.frame(W, 19, block(1, 19)));
    let Action::Replay {
        from_seq: 17,
        ticket,
        ..
    } = asked
    else {
        panic!("{asked:?}");
    };
    let frames = (17..=19).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert!(room.frame(W, 18, block(1, 18)).actions.is_empty());
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.index.held(W).len(), 7);
    assert_eq!(
        room.metric("dynamo_kvdelta_recoveries_total{outcome=\"replaced\"}"),
        2
    );
}

#[test]
fn b04_a_failed_recovery_keeps_the_worker_from_backing_claims() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    start_of_dynamo(&mut room);
    let Action::Replay { ticket, .. } = one(&room.frame(W, 15, block(1, 15))) else {
        panic!("a range is asked for");
    };
    let out = room.ingest.recovery_failed(W, ticket, room.now);
    assert!(out.actions.is_empty(), "not at once again");
    assert_eq!(room.state(W), holes(Reason::RecoveryFailed));
    let Action::Replay { ticket, .. } = one(&room.wait(Duration::from_millis(500))) else {
        panic!("it is asked for again");
    };
    room.ingest
        .dumped(W, ticket, vec![block(1, 15)], 15, room.now);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn b04_an_id_seen_twice_with_other_content_is_of_another_life() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    start_of_dynamo(&mut room);
    assert!(
        room.frame(W, 9, block(1, 9)).actions.is_empty(),
        "told twice"
    );
    assert_eq!(room.state(W), COMPLETE);
    let out = room.frame(W, 1, block(2, 1));
    let out = if out.actions.is_empty() {
        room.wait(Duration::from_secs(1))
    } else {
        out
    };
    let Action::Dump { ticket, .. } = one(&out) else {
        panic!("{out:?}");
    };
    room.ingest
        .dumped(W, ticket, vec![block(2, 1)], 1, room.now);
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.index.held(W).len(), 1);
}

#[test]
fn b05_a_restart_in_place_empties_the_rank() {
    for link in [Link::ZMQ, Link::ZMQ_REPLAY] {
        let mut room = room(&[(0, link)]);
        forty(&mut room);
        let h9 = stored(&[9], None, &[91, 92, 93, 94]);
        room.frame(W, 0, payload(W, 2, &[h9]));
        assert_eq!(room.q(W, &PROMPT), 0);
        assert_eq!(room.q(W, &[91, 92, 93, 94]), 1);
        assert_eq!(room.state(W), COMPLETE);
        room.frame(W, 1, block(2, 1));
        assert_eq!(room.index.held(W).len(), 2, "not taken for late");
    }
}

#[test]
fn b05a_the_first_frames_after_the_restart_are_lost() {
    let mut without = room(&[(0, Link::ZMQ)]);
    forty(&mut without);
    assert!(without.frame(W, 3, block(2, 3)).actions.is_empty());
    assert_eq!(without.q(W, &PROMPT), 0);
    assert_eq!(without.index.held(W).len(), 1);
    assert_eq!(without.state(W), holes(Reason::RestartedUnseen));

    let mut with = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut with);
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = one(&with.frame(W, 3, block(2, 3)))
    else {
        panic!("all is asked for");
    };
    assert_eq!(with.q(W, &PROMPT), 0);
    assert_eq!(with.state(W), holes(Reason::Recovering));
    let frames = (0..=3).map(|seq| Frame {
        seq,
        payload: block(2, seq),
    });
    with.ingest.replayed(W, ticket, frames.collect(), with.now);
    assert_eq!(with.state(W), COMPLETE);
    assert_eq!(with.index.held(W).len(), 4);
}

#[test]
fn b05b_a_restart_that_looks_like_a_gap_replaces() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    let Action::Replay {
        from_seq: 40,
        ticket,
        ..
    } = one(&room.frame(W, 55, block(2, 55)))
    else {
        panic!("asked from the last applied one");
    };
    let frames = |from| {
        (from..=55)
            .map(|seq| Frame {
                seq,
                payload: block(2, seq),
            })
            .collect()
    };
    let out = room.ingest.replayed(W, ticket, frames(40), room.now);
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = one(&out)
    else {
        panic!("frame 40 is another one, so all is asked for");
    };
    assert_eq!(room.state(W), holes(Reason::Recovering));
    room.ingest.replayed(W, ticket, frames(0), room.now);
    assert_eq!(room.q(W, &PROMPT), 0);
    assert_eq!(room.index.held(W).len(), 56);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn b05b_a_replay_that_does_not_reach_the_start_replaces_and_may_have_holes() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    let Action::Replay { ticket, .. } = one(&room.frame(W, 55, block(2, 55))) else {
        panic!("asked");
    };
    let frames = (50..=55).map(|seq| Frame {
        seq,
        payload: block(2, seq),
    });
    let out = room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert!(out.actions.is_empty(), "all would bring the same");
    assert_eq!(room.q(W, &PROMPT), 0);
    assert_eq!(room.index.held(W).len(), 6);
    assert_eq!(room.state(W), holes(Reason::ReplayTooShort));
    room.frame(W, 56, payload(W, 2, &[Change::Cleared]));
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn b05_an_ordinary_gap_is_added() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    let Action::Replay {
        from_seq: 40,
        ticket,
        ..
    } = one(&room.frame(W, 43, block(1, 43)))
    else {
        panic!("asked");
    };
    assert!(
        room.frame(W, 44, block(1, 44)).actions.is_empty(),
        "one request at a time"
    );
    let frames = (40..=43).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert_eq!(room.q(W, &PROMPT), 2);
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.trust.standing(W, room.now).unwrap().last_seq, Some(44));
    let late = room.ingest.replayed(W, ticket, Vec::new(), room.now);
    assert!(
        late.actions.is_empty() && late.transitions.is_empty(),
        "answered already"
    );
}

#[test]
fn b05c_a_rank_that_is_not_announced_any_more_is_gone() {
    let mut room = room(&[(0, Link::ZMQ), (1, Link::ZMQ)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    room.frame(W1, 0, payload(W1, 1, &[two_blocks()]));
    room.ingest
        .admit(WorkerId(7), &[(DpRank(0), Link::ZMQ)], room.now);
    assert_eq!((room.q(W, &PROMPT), room.q(W1, &PROMPT)), (2, 0));
    assert!(room.trust.standing(W1, room.now).is_none());
    room.frame(W1, 1, payload(W1, 1, &[two_blocks()]));
    assert_eq!(room.q(W1, &PROMPT), 0);
}

#[test]
fn b08_a_clear_is_of_its_rank_and_makes_it_complete() {
    let mut room = room(&[(0, Link::ZMQ), (1, Link::ZMQ)]);
    // Both were joined late: what they held before is not known.
    room.frame(W, 5, payload(W, 1, &[two_blocks()]));
    room.frame(W1, 5, payload(W1, 1, &[two_blocks()]));
    assert_eq!(room.state(W), holes(Reason::JoinedLate));
    room.frame(W, 6, payload(W, 1, &[Change::Cleared]));
    assert_eq!((room.q(W, &PROMPT), room.q(W1, &PROMPT)), (0, 2));
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.state(W1), holes(Reason::JoinedLate));
    let h1 = stored(&[1], None, &[1, 2, 3, 4]);
    room.frame(W, 7, payload(W, 1, &[h1]));
    assert_eq!(room.q(W, &PROMPT), 1);
    room.frame(W, 9, block(1, 9));
    assert_eq!(
        room.state(W),
        holes(Reason::Gap),
        "complete until the next gap"
    );
}

#[test]
fn b08_an_idle_engine_that_resets_tells_nothing_and_its_decode_worker_does() {
    let mut room = room(&[(0, Link::ZMQ)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    assert_eq!(room.state(W), COMPLETE);
    let said = StaleClaim {
        said_blocks: 2,
        had_blocks: 0,
        missing: Some(EngineHash(1)),
    };
    let told = room.trust.report_stale(W, said, room.now).unwrap();
    assert_eq!(told.to, holes(Reason::StaleClaim(said)));
    room.wait(Duration::from_secs(2));
    assert_eq!(room.state(W), holes(Reason::StaleClaim(said)));
    assert_eq!(room.q(W, &PROMPT), 2, "it still counts for routing");
    // The clear comes with the engine's next step.
    room.frame(W, 1, payload(W, 1, &[Change::Cleared]));
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_stale_claim_is_settled_by_the_removal_that_was_under_way() {
    let mut room = room(&[(0, Link::ZMQ)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    let said = StaleClaim {
        said_blocks: 2,
        had_blocks: 1,
        missing: Some(EngineHash(2)),
    };
    room.trust.report_stale(W, said, room.now);
    room.frame(W, 1, payload(W, 1, &[removed(&[1])]));
    assert_eq!(room.state(W), holes(Reason::StaleClaim(said)));
    room.frame(W, 2, payload(W, 1, &[removed(&[2])]));
    assert_eq!(room.state(W), COMPLETE);
    // The removal came before the report.
    room.trust.report_stale(W, said, room.now);
    room.wait(Duration::ZERO);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_stale_claim_is_settled_by_a_rebuild_asked_for_after_it() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    let said = StaleClaim {
        said_blocks: 2,
        had_blocks: 0,
        missing: None,
    };
    room.trust.report_stale(W, said, room.now);
    room.wait(Duration::ZERO);
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = one(&room.wait(Duration::from_millis(500)))
    else {
        panic!("all is asked for");
    };
    // Another report, after the request: the answer does not settle it.
    room.trust.report_stale(W, said, room.now);
    let frames = || {
        vec![Frame {
            seq: 0,
            payload: payload(W, 1, &[two_blocks()]),
        }]
    };
    room.ingest.replayed(W, ticket, frames(), room.now);
    assert_eq!(room.state(W), holes(Reason::StaleClaim(said)));
    let Action::Replay { ticket, .. } = one(&room.wait(Duration::from_millis(500))) else {
        panic!("asked again");
    };
    room.ingest.replayed(W, ticket, frames(), room.now);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn b10_unknown_parents_cause_one_refresh() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let h4 = || stored(&[4], Some(2), &[13, 14, 15, 16]);
    let h123 = stored(&[1, 2, 3], None, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    let told = [
        payload(W, 1, &[h123]),
        payload(W, 1, &[removed(&[1, 2, 3])]),
    ];
    for (seq, told) in (0..).zip(told.clone()) {
        room.frame(W, seq, told);
    }
    let out = room.frame(W, 2, payload(W, 1, &[h4()]));
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = one(&out)
    else {
        panic!("{out:?}");
    };
    for seq in 3..20 {
        assert!(
            room.frame(W, seq, payload(W, 1, &[h4()]))
                .actions
                .is_empty()
        );
    }
    assert_eq!(room.state(W), holes(Reason::Recovering));
    let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16];
    assert_eq!(room.q(W, &prompt), 0);
    let mut frames: Vec<_> = (0..)
        .zip(told)
        .map(|(seq, payload)| Frame { seq, payload })
        .collect();
    frames.extend((2..20).map(|seq| Frame {
        seq,
        payload: payload(W, 1, &[h4()]),
    }));
    let out = room.ingest.replayed(W, ticket, frames, room.now);
    assert!(
        out.actions.is_empty(),
        "the engine tells no more than that: {out:?}"
    );
    assert_eq!(room.state(W), COMPLETE);
    // Again, soon after: it has to wait.
    assert!(room.frame(W, 20, payload(W, 1, &[h4()])).actions.is_empty());
    assert_eq!(room.state(W), holes(Reason::UnknownParent));
    room.frame(W, 21, payload(W, 1, &[stored(&[1, 2], None, &PROMPT)]));
    assert!((2..=3).contains(&room.q(W, &prompt)));
    assert_eq!(room.wait(Duration::from_millis(500)).actions.len(), 1);
}

#[test]
fn b10_the_first_event_ever_has_an_unknown_parent() {
    let mut room = room(&[(0, Link::ZMQ)]);
    room.frame(
        W,
        0,
        payload(W, 1, &[stored(&[4], Some(2), &[13, 14, 15, 16])]),
    );
    assert_eq!(room.state(W), holes(Reason::UnknownParent));
    assert!(room.index.held(W).is_empty());
}

#[test]
fn b14_the_rank_in_the_batch_wins() {
    let mut room = room(&[(0, Link::ZMQ), (1, Link::ZMQ)]);
    room.frame(W, 0, payload(W1, 1, &[two_blocks()]));
    assert_eq!((room.q(W, &PROMPT), room.q(W1, &PROMPT)), (0, 2));
    assert_eq!(room.state(W1), COMPLETE);
    // A gap on the stream is one of every rank that it tells of.
    room.frame(W, 2, payload(W1, 1, &[Change::Cleared, two_blocks()]));
    assert_eq!(room.state(W), holes(Reason::Gap));
    assert_eq!(room.state(W1), COMPLETE, "cleared in the same batch");
    // Two streams for one rank: nobody knows their order.
    room.frame(W1, 0, payload(W1, 1, &[two_blocks()]));
    assert_eq!(room.state(W1), holes(Reason::FedTwice));
}

#[test]
fn b14_ranks_are_separate_and_other_workers_out_of_reach() {
    let mut room = room(&[(0, Link::ZMQ), (1, Link::ZMQ)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    room.frame(W1, 0, payload(W1, 1, &[]));
    room.frame(W1, 5, payload(W1, 1, &[]));
    assert_eq!(
        (room.state(W), room.state(W1)),
        (COMPLETE, holes(Reason::Gap))
    );
    let other = WorkerRank::new(8, 0);
    room.ingest
        .admit(WorkerId(8), &[(DpRank(0), Link::ZMQ)], room.now);
    room.frame(W, 1, payload(other, 1, &[two_blocks()]));
    assert_eq!(room.q(other, &PROMPT), 0);
    assert_eq!(room.state(other).0, Trust::Unknown);
    assert_eq!(room.state(W), holes(Reason::Malformed));
}

#[test]
fn b31_late_events_of_a_removed_worker_leave_nothing_behind() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let asked = one(&room.ingest.connected(W, room.now));
    let Action::Replay { ticket, .. } = asked else {
        panic!("{asked:?}");
    };
    room.ingest.remove(WorkerId(7), room.now);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    let late = vec![Frame {
        seq: 0,
        payload: payload(W, 1, &[two_blocks()]),
    }];
    room.ingest.replayed(W, ticket, late, room.now);
    assert_eq!(room.q(W, &PROMPT), 0);
    assert!(room.index.ranks().is_empty());
    assert!(room.trust.standing(W, room.now).is_none());
    assert!(!room.trust.may_back_claim(W, room.now));
    assert_eq!(
        room.metric("dynamo_kvdelta_frames_dropped_total{reason=\"not_admitted\"}"),
        1
    );
}

#[test]
fn b34_a_worker_without_events_is_silent_within_the_stated_time() {
    let mut room = room(&[(0, Link::ZMQ), (1, Link::ZMQ)]);
    room.ingest.connected(W1, room.now);
    let unknown = (Trust::Unknown, Some(Reason::NeverHeard));
    assert_eq!((room.state(W), room.state(W1)), (unknown, unknown));
    let told = room.wait(SILENT).transitions;
    assert_eq!(told.len(), 2, "each is told once");
    assert_eq!(room.state(W), (Trust::Silent, Some(Reason::NeverHeard)));
    assert_eq!(
        room.state(W1),
        (Trust::Silent, Some(Reason::PublishesNothing))
    );
    assert!(room.wait(SILENT).transitions.is_empty());
    room.frame(W1, 0, payload(W1, 1, &[two_blocks()]));
    assert_eq!(room.state(W1), COMPLETE);
}

#[test]
fn an_idle_engine_is_not_silent_while_it_shows_signs_of_life() {
    let mut room = room(&[(0, Link::ZMQ)]);
    room.frame(W, 0, payload(W, 1, &[two_blocks()]));
    for _ in 0..10 {
        room.wait(SILENT / 2);
        room.ingest.alive(W, room.now);
        assert_eq!(room.state(W), COMPLETE);
    }
    // Nobody has to tick for a reader to see it.
    room.now = room.now.plus(SILENT);
    assert_eq!(room.state(W), (Trust::Silent, Some(Reason::NoSignOfLife)));
    assert!(!room.trust.may_back_claim(W, room.now));
    room.ingest.alive(W, room.now);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_late_subscriber_asks_for_all_there_is() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = one(&room.ingest.connected(W, room.now))
    else {
        panic!("asked from the start");
    };
    room.frame(W, 3, block(1, 3));
    assert_eq!(room.state(W), holes(Reason::Recovering));
    let frames = (0..=2).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert_eq!(room.index.held(W).len(), 4);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn an_engine_that_has_published_nothing_is_known_to_be_empty() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let Action::Replay { ticket, .. } = one(&room.ingest.connected(W, room.now)) else {
        panic!("asked");
    };
    room.ingest.replayed(W, ticket, Vec::new(), room.now);
    assert_eq!(room.state(W), COMPLETE);
    assert!(room.frame(W, 0, block(1, 0)).actions.is_empty());
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_broken_connection_lowers_trust_until_the_stream_is_proved_unbroken() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    room.ingest.disconnected(W, room.now);
    assert_eq!(room.state(W), holes(Reason::Disconnected));
    assert!(
        room.wait(Duration::from_secs(1)).actions.is_empty(),
        "nobody to ask"
    );
    let Action::Replay {
        from_seq: 40,
        ticket,
        ..
    } = one(&room.ingest.connected(W, room.now))
    else {
        panic!("asked from the last applied one");
    };
    let frames = vec![Frame {
        seq: 40,
        payload: block(1, 40),
    }];
    room.ingest.replayed(W, ticket, frames, room.now);
    assert_eq!(room.state(W), COMPLETE);

    // Without a replay nothing can prove it.
    let mut without = self::room(&[(0, Link::ZMQ)]);
    forty(&mut without);
    without.ingest.disconnected(W, without.now);
    without.ingest.connected(W, without.now);
    without.frame(W, 41, block(1, 41));
    assert_eq!(without.state(W), holes(Reason::Disconnected));
}

#[test]
fn a_probe_finds_a_lost_last_frame_without_lowering_trust() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    let Action::Replay {
        from_seq: 40,
        ticket,
        ..
    } = one(&room.wait(Duration::from_secs(10)))
    else {
        panic!("an idle stream is asked for its last frame");
    };
    assert_eq!(room.state(W), COMPLETE);
    let frames = (40..=41).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert_eq!(room.index.held(W).len(), 43);
    // Its live copy was only slow, and is not taken for a restart.
    room.frame(W, 41, block(1, 41));
    room.frame(W, 42, block(1, 42));
    assert_eq!(room.index.held(W).len(), 44);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_probe_after_a_dump_finds_a_lost_last_frame() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    let Action::Dump { ticket, .. } = one(&room.ingest.connected(W, room.now)) else {
        panic!("asked for all");
    };
    room.ingest
        .dumped(W, ticket, vec![block(1, 9)], 9, room.now);
    assert_eq!(room.state(W), COMPLETE);
    // Frame 9 was never seen, so the answer can only show where the stream ends.
    for _ in 0..2 {
        let Action::Replay {
            from_seq: 9,
            ticket,
            ..
        } = one(&room.wait(Duration::from_secs(10)))
        else {
            panic!("an idle stream is asked for its last frame");
        };
        assert_eq!(room.state(W), COMPLETE);
        let frames = vec![Frame {
            seq: 9,
            payload: block(1, 9),
        }];
        let out = room.ingest.replayed(W, ticket, frames, room.now);
        assert!(out.actions.is_empty(), "{out:?}");
        assert_eq!(room.state(W), COMPLETE);
    }
    // Now it is known: another frame 9 is of another life.
    let Action::Replay { ticket, .. } = one(&room.wait(Duration::from_secs(10))) else {
        panic!("asked");
    };
    let frames = vec![Frame {
        seq: 9,
        payload: block(2, 9),
    }];
    let out = room.ingest.replayed(W, ticket, frames, room.now);
    let Action::Dump { ticket, .. } = one(&out) else {
        panic!("{out:?}");
    };
    room.ingest
        .dumped(W, ticket, vec![block(2, 9)], 9, room.now);
    let Action::Replay { ticket, .. } = one(&room.wait(Duration::from_secs(10))) else {
        panic!("asked");
    };
    // Frame 10 was lost, and none followed.
    let frames = (9..=10).map(|seq| Frame {
        seq,
        payload: block(2, seq),
    });
    let out = room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert_eq!(room.state(W), holes(Reason::Recovering));
    let Action::Dump { ticket, .. } = one(&out) else {
        panic!("{out:?}");
    };
    let both = vec![block(2, 9), block(2, 10)];
    room.ingest.dumped(W, ticket, both, 10, room.now);
    assert_eq!(room.index.held(W).len(), 2);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_probe_finds_a_lost_first_frame() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let Action::Replay { ticket, .. } = one(&room.ingest.connected(W, room.now)) else {
        panic!("asked");
    };
    room.ingest.replayed(W, ticket, Vec::new(), room.now);
    for frames in [Vec::new(), vec![block(1, 0)]] {
        assert_eq!(room.state(W), COMPLETE);
        let Action::Replay {
            from_seq: 0,
            ticket,
            ..
        } = one(&room.wait(Duration::from_secs(10)))
        else {
            panic!("an idle stream is asked for its first frame");
        };
        assert_eq!(room.state(W), COMPLETE);
        let frames = (0..).zip(frames);
        let frames = frames.map(|(seq, payload)| Frame { seq, payload });
        room.ingest.replayed(W, ticket, frames.collect(), room.now);
    }
    assert_eq!(room.index.held(W).len(), 1);
    assert_eq!(room.state(W), COMPLETE);
}

/// The answer was made before the frame that the full queue dropped.
#[test]
fn an_overflow_while_an_answer_is_under_way_is_asked_about_again() {
    for link in [Link::ZMQ_REPLAY, Link::DYNAMO] {
        let mut room = room(&[(0, link)]);
        if link.dumps {
            start_of_dynamo(&mut room);
        } else {
            forty(&mut room);
        }
        let Action::Replay {
            from_seq, ticket, ..
        } = one(&room.wait(Duration::from_secs(10)))
        else {
            panic!("a probe");
        };
        let out = room.ingest.overflowed(W, 1, room.now);
        assert!(out.actions.is_empty(), "one request at a time");
        let last = || {
            vec![Frame {
                seq: from_seq,
                payload: block(1, from_seq),
            }]
        };
        let out = room.ingest.replayed(W, ticket, last(), room.now);
        assert_eq!(room.state(W), holes(Reason::Recovering), "{link:?}");
        let Action::Replay { ticket, .. } = one(&out) else {
            panic!("{out:?}");
        };
        room.ingest.replayed(W, ticket, last(), room.now);
        assert_eq!(room.state(W), COMPLETE);
    }
}

/// A busy engine publishes more than a few frames while it makes its answer.
#[test]
fn frames_that_an_answer_covers_are_not_taken_for_another_life() {
    let mut room = room(&[(0, Link::DYNAMO)]);
    start_of_dynamo(&mut room);
    let Action::Replay { ticket, .. } = one(&room.frame(W, 15, block(1, 15))) else {
        panic!("a range is asked for");
    };
    for seq in 16..=500 {
        room.frame(W, seq, block(1, seq));
    }
    let frames = (9..=490).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    let out = room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert!(out.actions.is_empty(), "{out:?}");
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.index.held(W).len(), 501);

    let Action::Replay { ticket, .. } = one(&room.frame(W, 510, block(1, 510))) else {
        panic!("a range is asked for");
    };
    for seq in 511..=1000 {
        room.frame(W, seq, block(1, seq));
    }
    let all = (0..=990).map(|seq| block(1, seq)).collect();
    let out = room.ingest.dumped(W, ticket, all, 990, room.now);
    assert!(out.actions.is_empty(), "{out:?}");
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.index.held(W).len(), 1001);
}

#[test]
fn held_frames_are_bounded_and_what_is_dropped_is_counted() {
    // A frame of the model counts 1,000 bytes.
    let by_frames = (10, usize::MAX);
    let by_bytes = (usize::MAX, 10_999);
    for (held_frames, held_bytes) in [by_frames, by_bytes] {
        held_frames_are_bounded(Limits {
            held_frames,
            held_bytes,
            ..Limits::default()
        });
    }
}

fn held_frames_are_bounded(limits: Limits) {
    let mut room = Room::new(limits);
    room.ingest
        .admit(WorkerId(7), &[(DpRank(0), Link::ZMQ_REPLAY)], room.now);
    forty(&mut room);
    let Action::Replay { ticket, .. } = one(&room.frame(W, 43, block(1, 43))) else {
        panic!("asked");
    };
    for seq in 44..100 {
        room.frame(W, seq, block(1, seq));
    }
    assert_eq!(
        room.metric("dynamo_kvdelta_frames_dropped_total{reason=\"held_queue_full\"}"),
        47
    );
    // The answer was made before most of them: another one is needed for those that were dropped.
    let frames = |from, to| {
        (from..=to)
            .map(|seq| Frame {
                seq,
                payload: block(1, seq),
            })
            .collect()
    };
    let out = room.ingest.replayed(W, ticket, frames(40, 50), room.now);
    let Action::Replay {
        from_seq: 50,
        ticket,
        ..
    } = one(&out)
    else {
        panic!("{out:?}");
    };
    room.ingest.replayed(W, ticket, frames(50, 99), room.now);
    assert_eq!(room.state(W), COMPLETE);
    assert_eq!(room.index.held(W).len(), 101);
}

#[test]
fn an_overflow_of_the_feed_is_a_hole_where_nothing_can_be_asked() {
    let mut without = room(&[(0, Link::ZMQ)]);
    forty(&mut without);
    without.ingest.overflowed(W, 3, without.now);
    assert_eq!(without.state(W), holes(Reason::Overflow));
    let mut with = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut with);
    let asked = one(&with.ingest.overflowed(W, 3, with.now));
    assert!(matches!(asked, Action::Replay { from_seq: 40, .. }));
    assert_eq!(
        with.metric("dynamo_kvdelta_frames_dropped_total{reason=\"feed_queue_full\"}"),
        3
    );
}

#[test]
fn after_failures_frames_are_applied_for_routing_and_tries_grow_rare() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    forty(&mut room);
    let mut out = room.frame(W, 43, block(1, 43));
    let mut tries = 0;
    let mut seq = 44;
    for _ in 0..600 {
        for action in &out.actions {
            let (Action::Replay { ticket, .. } | Action::Dump { ticket, .. }) = *action;
            tries += 1;
            let failed = room.ingest.recovery_failed(W, ticket, room.now);
            assert!(failed.actions.is_empty());
        }
        out = room.wait(Duration::from_millis(500));
        room.frame(W, seq, block(1, seq));
        seq += 1;
        assert_eq!(room.state(W).0, Trust::MayHaveHoles);
    }
    assert!((8..=14).contains(&tries), "{tries} tries in five minutes");
    assert!(room.index.held(W).len() > 600, "applied meanwhile");
    let action = loop {
        if let [action] = room.wait(Duration::from_secs(1)).actions[..] {
            break action;
        }
    };
    let Action::Replay {
        from_seq: 0,
        ticket,
        ..
    } = action
    else {
        panic!("{action:?}");
    };
    let frames = (0..seq).map(|seq| Frame {
        seq,
        payload: block(1, seq),
    });
    room.ingest.replayed(W, ticket, frames.collect(), room.now);
    assert_eq!(room.state(W), COMPLETE);
}

#[test]
fn a_request_without_an_answer_fails() {
    let mut room = room(&[(0, Link::ZMQ_REPLAY)]);
    let first = one(&room.ingest.connected(W, room.now));
    let again = one(&room.wait(Duration::from_secs(10)));
    assert_ne!(first, again);
    assert_eq!(
        room.metric("dynamo_kvdelta_recoveries_total{outcome=\"failed\"}"),
        1
    );
}
