use std::collections::{BTreeMap, BTreeSet};

use kvdelta_indexer::{BlockSize, EngineHash, WorkerRank};
use proptest::prelude::*;

use super::{Asked, Choice, NoChoice, choose, choose_pair, lot};
use crate::candidate::{Candidate, Load, PrefillCandidate, Refusal};
use crate::claimable::PromptShape;
use crate::cost::{BlockCost, Form, PairCost, Rate, Share, Weight};
use crate::sizes::Place;

const W1: WorkerRank = WorkerRank::new(1, 0);
const W2: WorkerRank = WorkerRank::new(2, 0);
const W3: WorkerRank = WorkerRank::new(3, 0);
const P1: WorkerRank = WorkerRank::new(101, 0);
const P2: WorkerRank = WorkerRank::new(102, 0);
/// One of the prompt's 54 blocks: 1 MiB in a millisecond.
const BLOCK_BYTES: u64 = 1 << 20;

const FORMS: [Form; 3] = [Form::Subtracted, Form::Missing, Form::BelowPeak];

fn asked(blocks: usize, tie_break: u64) -> Asked {
    let block_size = BlockSize::try_from(16).unwrap();
    Asked {
        shape: PromptShape {
            prompt_tokens: blocks * 16,
            block_size,
            drops_last_block: false,
        },
        busy: None,
        size: None,
        tie_break,
    }
}

fn by_blocks(form: Form, weight: f64) -> BlockCost {
    let weight = Weight::try_from(weight).unwrap();
    BlockCost { form, weight }
}

/// A block that travels costs a millisecond, and a block of load costs `decode_ms`.
fn by_pair(decode_ms: f64) -> PairCost {
    PairCost {
        prefill_tokens_per_ms: Rate::try_from(16.0).unwrap(),
        block_bytes: BLOCK_BYTES,
        decode_ms_per_block: Weight::try_from(decode_ms).unwrap(),
    }
}

fn link() -> Rate {
    Rate::try_from(BLOCK_BYTES as f64).unwrap()
}

fn holding(of: WorkerRank, blocks: usize) -> Candidate {
    let last = (blocks > 0).then_some(EngineHash(blocks as u64));
    Candidate::new(of).with_cached(blocks, last)
}

/// Numbers that look random, one a request.
fn draw(request: u64) -> u64 {
    lot(request, W1)
}

/// The three workers of B32, or what one router knows of them.
fn b32() -> Vec<Candidate> {
    vec![
        holding(W1, 50).with_load(Load::new(400)),
        Candidate::new(W2).with_load(Load::new(0)),
        Candidate::new(W3),
    ]
}

/// Which decode rank each of `requests` went to, each booked before the next.
fn burst(
    view: &mut [Candidate],
    requests: std::ops::Range<u64>,
    choose: impl Fn(&[Candidate], Asked) -> WorkerRank,
) -> Vec<WorkerRank> {
    let went = requests.map(|request| {
        let of = choose(view, asked(54, draw(request)));
        let booked = view.iter_mut().find(|one| one.of == of).unwrap();
        let active = booked.load.map_or(0, |load| load.active_blocks);
        booked.load = Some(Load::new(active + 54));
        of
    });
    went.collect()
}

fn shares(went: &[WorkerRank]) -> BTreeMap<WorkerRank, usize> {
    let mut shares = BTreeMap::new();
    for of in went {
        *shares.entry(*of).or_insert(0) += 1;
    }
    shares
}

type Chooser = Box<dyn Fn(&[Candidate], Asked) -> WorkerRank>;

/// By each cost.
fn choosers() -> Vec<(String, Chooser)> {
    let mut all: Vec<(String, Chooser)> = Vec::new();
    for form in FORMS {
        for weight in [0.0, 0.5, 1.0, 2.0, 4.0] {
            // At the peak of 400 and more, 50 blocks of overlap are then worth it.
            if form == Form::BelowPeak && weight > 2.0 {
                continue;
            }
            let cost = by_blocks(form, weight);
            let of = move |view: &[Candidate], asked| choose(view, cost, asked).unwrap().best.of();
            all.push((format!("{form:?} {weight}"), Box::new(of)));
        }
    }
    for decode_ms in [0.25, 0.5, 1.0] {
        let prefill = [P1, P2].map(PrefillCandidate::new);
        let cost = by_pair(decode_ms);
        let of = move |view: &[Candidate], asked| {
            let choice = choose_pair(&prefill, view, cost, |_, _| Some(link()), asked);
            choice.unwrap().best.of()
        };
        all.push((format!("pair {decode_ms}"), Box::new(of)));
    }
    all
}

/// B32: 4 + 400 against 54 + 0, and a worker without a load entry.
#[test]
fn b32_a_shared_prefix_makes_no_hot_spot_of_64_requests_at_once() {
    for (name, choose) in choosers() {
        let mut view = b32();
        let went = burst(&mut view, 0..64, choose);
        assert_ne!(went[0], W1, "{name}");
        let shares = shares(&went);
        for of in [W1, W2, W3] {
            let share = shares.get(&of).copied().unwrap_or(0);
            assert!((5..40).contains(&share), "{name}: {shares:?}");
        }
        // W1 is ahead by what its overlap is worth at most, 50 blocks x 4, and one request; or not yet at the peak,
        // which is no less than twice the mean.
        let loads: Vec<_> = view
            .iter()
            .map(|one| one.load.unwrap().active_blocks)
            .collect();
        let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
        let mean = loads.iter().sum::<usize>() / 3;
        let most = if name.starts_with("BelowPeak") {
            mean
        } else {
            200 + 54
        };
        assert!(spread <= most, "{name}: {loads:?}");
    }
}

#[test]
fn b32_two_routers_that_do_not_see_each_other_use_all_workers_too() {
    for (name, choose) in choosers() {
        let views = [b32(), b32()];
        let went: Vec<_> = views
            .into_iter()
            .zip([0..32, 32..64])
            .flat_map(|(mut view, requests)| burst(&mut view, requests, &choose))
            .collect();
        let shares = shares(&went);
        assert!(shares[&W2] >= 10 && shares[&W3] >= 10, "{name}: {shares:?}");
        assert!(
            shares.values().all(|share| *share < 44),
            "{name}: {shares:?}"
        );
    }
}

#[test]
fn b32_paced_one_by_one_the_loaded_worker_is_left_alone_and_equal_ones_are_spread() {
    for (name, choose) in choosers() {
        // Once W3 has served a request, its load is known to be 0 as well.
        for known in [None, Some(Load::new(0))] {
            let mut view = b32();
            view[2].load = known;
            let went: Vec<_> = (0..64)
                .map(|request| choose(&view, asked(54, draw(request))))
                .collect();
            let shares = shares(&went);
            assert_eq!(shares.get(&W1), None, "{name}");
            assert!(shares[&W2] >= 16 && shares[&W3] >= 16, "{name}: {shares:?}");
        }
    }
}

#[test]
fn weight_0_is_load_alone() {
    let view = [
        holding(W1, 50).with_load(Load::new(1)),
        Candidate::new(W2).with_load(Load::new(0)),
    ];
    for form in FORMS {
        let choice = choose(&view, by_blocks(form, 0.0), asked(54, 0)).unwrap();
        assert_eq!((choice.best.of(), choice.cheapest), (W2, 1));
        if form != Form::BelowPeak {
            assert_eq!(choice.best.terms.cost(), 54.0);
        }
    }
}

#[test]
fn no_overlap_draws_a_request_to_a_worker_without_room_or_past_its_line() {
    let warm = holding(W1, 50).with_capacity(1000);
    let cold = Candidate::new(W2)
        .with_load(Load::new(900))
        .with_capacity(1000);
    let cost = by_blocks(Form::Missing, 1000.0);
    let line = Some(Share::try_from(0.95).unwrap());
    let at = |active, busy| {
        let warm = warm.with_load(Load::new(active));
        let asked = Asked {
            busy,
            ..asked(54, 0)
        };
        let choice = choose(&[warm, cold], cost, asked).unwrap();
        let refused: Vec<_> = choice.refused.by_reason().collect();
        let pair = choose_pair(
            &[PrefillCandidate::new(P1)],
            &[warm, cold],
            by_pair(0.0),
            |_, _| Some(link()),
            asked,
        );
        let pair = pair.unwrap();
        assert_eq!(
            (pair.best.of(), pair.refused),
            (choice.best.of(), choice.refused)
        );
        (choice.best.of(), refused)
    };
    assert_eq!(at(996, None), (W1, vec![]), "4 blocks missing, room for 4");
    assert_eq!(at(997, None), (W2, vec![("no_room", 1)]));
    assert_eq!(
        at(2000, None),
        (W2, vec![("no_room", 1)]),
        "more than it has"
    );
    assert_eq!(at(950, line), (W1, vec![]), "on the line is not past it");
    assert_eq!(at(951, line), (W2, vec![("busy", 1)]));
    assert_eq!(
        warm.with_load(Load::new(997))
            .refusal(asked(54, 0).shape, None),
        Some(Refusal::NoRoom {
            free: 3,
            missing: 4
        })
    );
}

#[test]
fn what_is_not_known_refuses_nobody_but_who_could_never_hold_it() {
    let shape = asked(54, 0).shape;
    let line = Some(Share::try_from(0.0).unwrap());
    let unknown = Candidate::new(W1);
    assert_eq!(unknown.refusal(shape, line), None);
    assert_eq!(
        unknown
            .with_load(Load::new(usize::MAX))
            .refusal(shape, line),
        None
    );
    assert_eq!(unknown.with_capacity(54).refusal(shape, line), None);
    let why = unknown.with_capacity(53).refusal(shape, line);
    assert_eq!(
        why,
        Some(Refusal::NoRoom {
            free: 53,
            missing: 54
        })
    );
}

#[test]
fn an_unknown_load_is_the_least_of_the_known_ones_that_count() {
    let view = [
        Candidate::new(W1).with_load(Load::new(401)),
        holding(W2, 4).with_load(Load::new(200)),
        Candidate::new(W3),
        Candidate::new(WorkerRank::new(4, 0))
            .with_load(Load::new(0))
            .refused(Refusal::Taint),
    ];
    let choice = choose(&view, by_blocks(Form::Missing, 1.0), asked(54, 0)).unwrap();
    let next = choice.runner_up.unwrap();
    assert_eq!((choice.best.of(), next.of()), (W2, W3));
    assert_eq!(
        (next.terms.load.blocks, next.terms.load.is_known),
        (254, false)
    );
    assert_eq!(
        choice.to_string(),
        "decode on 2/0: 304 = load 254 + 1 x 50 of 54 missing; next 3/0: 308 = load 254 (assumed) + 1 x 54 of 54 \
         missing; 3 allowed, 1 refused (taint 1)"
    );
    let alone = choose(&view[2..], by_blocks(Form::Subtracted, 1.0), asked(54, 0)).unwrap();
    assert_eq!(
        alone.to_string(),
        "decode on 3/0: 54 = max(0, load 54 (assumed) - 1 x 0 of 54 cached); no other; 1 allowed, 1 refused \
         (taint 1)"
    );
}

#[test]
fn overlap_decides_below_the_peak_and_load_at_it() {
    let cost = by_blocks(Form::BelowPeak, 2.0);
    let at = |loads: [usize; 3], cached: usize| {
        let view = [holding(W1, cached), Candidate::new(W2), Candidate::new(W3)];
        let view: Vec<_> = view
            .into_iter()
            .zip(loads)
            .map(|(one, load)| one.with_load(Load::new(load)))
            .collect();
        choose(&view, cost, asked(54, 0)).unwrap().best.of()
    };
    // By `Missing`, 150 blocks of load outweigh 30 of overlap at this weight.
    assert_eq!(at([150, 300, 0], 30), W1);
    assert_eq!(at([300, 150, 0], 30), W3, "it would be busier still");
    assert_eq!(at([300, 150, 0], 54), W1, "but for so much overlap");
    assert_eq!(at([0, 0, 0], 7), W1, "idle ones");
    assert_eq!(at([1, 0, 1], 6), W2, "less than an eighth of the prompt");
    assert_eq!(at([1, 0, 1], 7), W1);
}

#[test]
fn a_prompt_leans_to_the_ranks_of_its_size_where_the_fleet_is_uneven() {
    let cost = by_blocks(Form::BelowPeak, 2.0);
    let at = |size: usize, loads: [usize; 2]| {
        let view: Vec<_> = [W1, W2]
            .into_iter()
            .zip(loads)
            .enumerate()
            .map(|(at, (of, load))| {
                let place = Place::middle(at, 2).unwrap();
                Candidate::new(of)
                    .with_load(Load::new(load))
                    .with_place(place)
            })
            .collect();
        let asked = Asked {
            size: Place::middle(size, 2),
            ..asked(54, 0)
        };
        choose(&view, cost, asked).unwrap()
    };
    for size in [0, 1] {
        let choice = at(size, [1, 1]);
        assert_eq!((choice.best.of(), choice.cheapest), ([W1, W2][size], 1));
        assert_eq!(at(size, [100, 100]).cheapest, 2, "even");
    }
    assert_eq!(
        at(1, [1, 1]).to_string(),
        "decode on 2/0: 121.026 = 13.026 for load 55 of peak 56 + 2 x 54 of 54 missing x 1.000; next 1/0: 131.826 = \
         13.026 for load 55 of peak 56 + 2 x 54 of 54 missing x 1.100; 2 allowed, 0 refused"
    );
}

/// B14: ranks of one worker are candidates of their own.
#[test]
fn b14_the_claim_is_of_the_rank_that_decodes() {
    let (rank0, rank1) = (WorkerRank::new(7, 0), WorkerRank::new(7, 1));
    let view = [
        Candidate::new(rank0).with_load(Load::new(0)),
        holding(rank1, 20).with_load(Load::new(0)),
    ];
    let choice = choose(&view, by_blocks(Form::Missing, 1.0), asked(54, 0)).unwrap();
    assert_eq!(
        (choice.best.of(), choice.best.cached.blocks),
        (rank1, 20),
        "not the worker's most"
    );
    let busy = [view[0], view[1].with_load(Load::new(100))];
    let choice = choose(&busy, by_blocks(Form::Missing, 1.0), asked(54, 0)).unwrap();
    assert_eq!((choice.best.of(), choice.best.cached.blocks), (rank0, 0));
    assert_eq!(choice.best.cached.last, None);
}

#[test]
fn none_and_none_that_may_be_chosen_are_said_apart() {
    let cost = by_blocks(Form::Missing, 1.0);
    let none = choose(&[], cost, asked(54, 0));
    assert_eq!(none, Err(NoChoice::NoCandidates));
    let view = [
        Candidate::new(W1).refused(Refusal::Overloaded),
        Candidate::new(W2).with_capacity(3),
    ];
    let all = choose(&view, cost, asked(54, 0)).unwrap_err();
    assert_eq!(
        all.to_string(),
        "no decode worker may be chosen: 2 refused (overloaded 1, no_room 1)"
    );
    let pair = |prefill: &[PrefillCandidate], decode: &[Candidate], linked: bool| {
        let link = |_, _| linked.then(link);
        choose_pair(prefill, decode, by_pair(1.0), link, asked(54, 0))
            .map(|choice| choice.best.of())
    };
    let (p1, free) = (PrefillCandidate::new(P1), [Candidate::new(W1)]);
    assert_eq!(pair(&[p1], &free, true), Ok(W1));
    assert_eq!(pair(&[p1], &view, true), Err(all));
    assert_eq!(pair(&[p1], &[], true), Err(NoChoice::NoCandidates));
    let says = |choice: Result<WorkerRank, NoChoice>| choice.unwrap_err().to_string();
    assert_eq!(
        says(pair(&[p1.refused(Refusal::Unavailable)], &free, true)),
        "no prefill worker may be chosen: 1 refused (unavailable 1)"
    );
    assert_eq!(
        says(pair(&[], &free, true)),
        "no prefill worker may be chosen: 0 refused"
    );
    assert_eq!(
        says(pair(&[p1], &free, false)),
        "no decode worker may be chosen: 1 refused (no_link 1)"
    );
}

#[test]
fn a_pair_is_weighed_as_a_pair() {
    // P1 has the prompt but waits; only P2 reaches W2.
    let prefill = [
        PrefillCandidate::new(P1).with_cached(50).with_queued(320),
        PrefillCandidate::new(P2).with_queued(0),
    ];
    let decode = [
        holding(W1, 50).with_load(Load::new(40)),
        Candidate::new(W2).with_load(Load::new(0)),
    ];
    let reach = |p, d| (p, d) != (P1, W2);
    let at = |decode_ms| {
        let link = |p, d| reach(p, d).then(link);
        choose_pair(&prefill, &decode, by_pair(decode_ms), link, asked(54, 0)).unwrap()
    };
    // W1 by P1: (320 + 64) / 16 + 4 blocks + 94 x 0.5; W2 by P2: 864 / 16 + 54 blocks + 54 x 0.5.
    assert_eq!(
        at(0.5).to_string(),
        "decode on 1/0: prefill on 101/0: 75.000 ms = prefill 24.000 (320 + 64 tokens) + transfer 4.000 (4 blocks, \
         50 cached) + decode 47.000 (load 94); next 2/0: prefill on 102/0: 135.000 ms = prefill 54.000 (0 + 864 \
         tokens) + transfer 54.000 (54 blocks, 0 cached) + decode 27.000 (load 54); 2 allowed, 0 refused"
    );
    let choice = at(4.0);
    assert_eq!((choice.best.of(), choice.best.terms.prefill), (W2, P2));
    assert_eq!(choice.best.terms.cost(), 54.0 + 54.0 + 216.0);
}

#[test]
fn absurd_numbers_still_choose() {
    let view = [
        holding(W1, usize::MAX).with_load(Load::new(usize::MAX)),
        holding(W2, 0).with_load(Load::new(usize::MAX)),
        holding(W3, 1),
    ];
    for form in FORMS {
        let choice = choose(&view, by_blocks(form, f64::MAX), asked(usize::MAX / 16, 1)).unwrap();
        assert!(!choice.best.terms.cost().is_nan());
    }
    let prefill = [PrefillCandidate::new(P1).with_queued(usize::MAX)];
    let slow = Rate::try_from(f64::MIN_POSITIVE).unwrap();
    let pair = choose_pair(
        &prefill,
        &view,
        by_pair(f64::MAX),
        |_, _| Some(slow),
        asked(3, 1),
    );
    assert!(!pair.unwrap().best.terms.cost().is_nan());
}

fn candidate() -> impl Strategy<Value = Candidate> {
    let of = (0_u64..8, 0_u32..3);
    let load = prop::option::of((0_usize..40, prop::option::of(0_usize..9)));
    let refused = prop::option::weighted(0.2, Just(Refusal::NotAllowed));
    let capacity = prop::option::of(0_usize..60);
    (of, 0_usize..9, load, capacity, refused, place()).prop_map(
        |((worker, rank), cached, load, capacity_blocks, refused, place)| {
            let mut candidate = holding(WorkerRank::new(worker, rank), cached);
            candidate.load = load.map(|(active_blocks, added_blocks)| Load {
                active_blocks,
                added_blocks,
            });
            candidate.capacity_blocks = capacity_blocks;
            candidate.refused = refused;
            candidate.place = place;
            candidate
        },
    )
}

fn place() -> impl Strategy<Value = Option<Place>> {
    (0_usize..9).prop_map(|at| Place::middle(at, 8))
}

fn fleet() -> impl Strategy<Value = Vec<Candidate>> {
    let all = prop::collection::vec(candidate(), 0..12).prop_map(|mut all| {
        all.sort_by_key(|one| one.of);
        all.dedup_by_key(|one| one.of);
        all
    });
    all.prop_shuffle()
}

fn prefills() -> impl Strategy<Value = Vec<PrefillCandidate>> {
    let one = (
        0_usize..9,
        prop::option::of(0_usize..300),
        prop::option::weighted(0.2, Just(Refusal::Taint)),
    );
    prop::collection::vec(one, 0..4).prop_map(|all| {
        let all = all.into_iter().zip(100..);
        let prefill = all.map(
            |((cached, queued_tokens, refused), worker)| PrefillCandidate {
                queued_tokens,
                refused,
                ..PrefillCandidate::new(WorkerRank::new(worker, 0)).with_cached(cached)
            },
        );
        prefill.collect()
    })
}

fn question() -> impl Strategy<Value = Asked> {
    let busy = prop::option::of(0.0_f64..=1.0);
    let numbers = (1_usize..200, busy, place(), any::<u64>());
    numbers.prop_map(|(prompt_tokens, busy, size, tie_break)| Asked {
        shape: PromptShape {
            prompt_tokens,
            ..asked(0, 0).shape
        },
        busy: busy.map(|share| Share::try_from(share).unwrap()),
        size,
        tie_break,
    })
}

/// What each candidate that may be chosen costs by itself, by the formula as the README has it.
fn costs(view: &[Candidate], cost: BlockCost, asked: Asked) -> BTreeMap<WorkerRank, f64> {
    let shape = asked.shape;
    let may = |one: &&Candidate| one.refusal(shape, asked.busy).is_none();
    let load = |one: &Candidate| one.load.map(|load| load.with_request(shape));
    let known: Vec<_> = view.iter().filter(may).filter_map(load).collect();
    let least = known.iter().min().copied().unwrap_or(shape.blocks());
    let weight = cost.weight.get();
    let prompt = shape.blocks() as f64;
    let booked = view.iter().filter(may).filter_map(|one| one.load);
    let booked: Vec<_> = booked.map(|load| load.active_blocks as f64).collect();
    let mean = (booked.iter().sum::<f64>() + prompt) / booked.len().max(1) as f64;
    let most = booked.iter().copied().fold(prompt, f64::max);
    let peak = most.max(2.0 * mean).max(1.0);
    let of = view.iter().filter(may).map(|one| {
        let load = load(one).unwrap_or(least) as f64;
        let cached = one.cached_blocks as f64;
        let cost = match cost.form {
            Form::BelowPeak => {
                let distance = match (one.place, asked.size) {
                    (Some(rank), Some(size)) if most > 1.5 * mean => rank.distance(size),
                    _ => 0.0,
                };
                let counted = if cached < prompt / 8.0 { 0.0 } else { cached };
                let missing = (prompt - counted).max(0.0);
                peak / 4.0 * (load / peak).powi(4) + weight * missing * (1.0 + 0.2 * distance)
            }
            Form::Subtracted => (load - weight * cached).max(0.0),
            Form::Missing => (load + weight * shape.blocks() as f64 - weight * cached).max(0.0),
        };
        (one.of, cost)
    });
    of.collect()
}

fn summary<T>(choice: &Choice<T>) -> (WorkerRank, Option<WorkerRank>, usize, usize) {
    let next = choice.runner_up.as_ref().map(|next| next.of());
    (choice.best.of(), next, choice.cheapest, choice.allowed)
}

proptest! {
    #[test]
    fn the_choice_is_the_cheapest_of_those_allowed(
        view in fleet(), form in prop::sample::select(&FORMS), weight in 0_u8..9, asked in question(),
    ) {
        let cost = by_blocks(form, f64::from(weight) / 4.0);
        let costs = costs(&view, cost, asked);
        match choose(&view, cost, asked) {
            Err(_) => prop_assert!(costs.is_empty()),
            Ok(choice) => {
                let best = costs[&choice.best.of()];
                prop_assert_eq!(best, choice.best.terms.cost());
                prop_assert!(costs.values().all(|other| best <= *other));
                let others = costs.iter().filter(|(of, _)| **of != choice.best.of());
                let next = others.map(|(_, cost)| *cost).min_by(f64::total_cmp);
                prop_assert_eq!(next, choice.runner_up.map(|next| next.terms.cost()));
                prop_assert_eq!(next, choice.runner_up.map(|next| costs[&next.of()]));
                let equal = costs.values().filter(|other| **other == best).count();
                prop_assert_eq!((equal, costs.len()), (choice.cheapest, choice.allowed));
                prop_assert_eq!(choice.allowed + choice.refused.total(), view.len());
            }
        }
    }

    #[test]
    fn the_order_of_the_candidates_does_not_matter(
        (view, other) in fleet().prop_flat_map(|view| (Just(view.clone()), Just(view).prop_shuffle())),
        (prefill, turned) in prefills().prop_flat_map(|all| (Just(all.clone()), Just(all).prop_shuffle())),
        weight in 0_u8..9, asked in question(),
    ) {
        // The sum of the loads is one of whole numbers, so that the peak does not depend on the order either.
        for form in FORMS {
            let cost = by_blocks(form, f64::from(weight) / 4.0);
            prop_assert_eq!(choose(&view, cost, asked), choose(&other, cost, asked));
        }
        let pair = |prefill: &[PrefillCandidate], view: &[Candidate]| {
            choose_pair(prefill, view, by_pair(0.5), |_, _| Some(link()), asked)
        };
        prop_assert_eq!(pair(&prefill, &view), pair(&turned, &other));
    }

    #[test]
    fn equal_ones_all_get_their_share(view in fleet(), weight in 0_u8..9, asked in question()) {
        let cost = by_blocks(Form::Subtracted, f64::from(weight) / 4.0);
        let costs = costs(&view, cost, asked);
        let best = costs.values().copied().min_by(f64::total_cmp);
        let equal: BTreeSet<_> = costs.iter().filter(|one| Some(*one.1) == best).map(|one| *one.0).collect();
        let went: Vec<_> = (0..400_u64)
            .filter_map(|request| {
                let tie_break = asked.tie_break.wrapping_add(draw(request));
                Some(choose(&view, cost, Asked { tie_break, ..asked }).ok()?.best.of())
            })
            .collect();
        let shares = shares(&went);
        prop_assert_eq!(shares.keys().copied().collect::<BTreeSet<_>>(), equal);
        // At most 12, so each has 33 in the mean.
        prop_assert!(shares.values().all(|share| *share >= 8), "{:?}", shares);
    }

    #[test]
    fn the_pair_is_the_cheapest_of_those_allowed(
        prefill in prefills(), view in fleet(), decode_ms in 0_u8..5, cut in 0_u64..12, asked in question(),
    ) {
        let cost = by_pair(f64::from(decode_ms) / 4.0);
        // Some have no link.
        let reach = |p: WorkerRank, d: WorkerRank| (p.worker.0 + d.worker.0) % 12 != cut;
        let link = |p, d| reach(p, d).then(link);
        let choice = choose_pair(&prefill, &view, cost, link, asked);
        let shape = asked.shape;
        let may_prefill: Vec<_> = prefill.iter().filter(|one| one.refused.is_none()).collect();
        let may: Vec<_> = view.iter().filter(|one| one.refusal(shape, asked.busy).is_none()).collect();
        let load = |one: &Candidate| one.load.map(|load| load.with_request(shape));
        let least_load = may.iter().filter_map(|one| load(one)).min().unwrap_or(shape.blocks());
        let queue = |one: &PrefillCandidate| one.queued_tokens;
        let queues = may_prefill.iter().filter_map(|one| queue(one));
        let least_queue = queues.min().unwrap_or(shape.prompt_tokens);
        let mut cheapest: BTreeMap<WorkerRank, f64> = BTreeMap::new();
        for d in &may {
            for p in may_prefill.iter().filter(|p| reach(p.of, d.of)) {
                let uncached = shape.prompt_tokens.saturating_sub(p.cached_blocks * 16).max(1);
                let prefill = (queue(p).unwrap_or(least_queue) + uncached) as f64 / 16.0;
                let transfer = shape.blocks().saturating_sub(d.cached_blocks) as f64;
                let decode = load(d).unwrap_or(least_load) as f64 * cost.decode_ms_per_block.get();
                let ms = prefill + transfer + decode;
                let least = cheapest.entry(d.of).or_insert(ms);
                *least = least.min(ms);
            }
        }
        match choice {
            Err(_) => prop_assert!(cheapest.is_empty()),
            Ok(choice) => {
                let least = cheapest.values().copied().min_by(f64::total_cmp).unwrap();
                prop_assert_eq!(choice.best.terms.cost(), least);
                prop_assert_eq!(cheapest[&choice.best.of()], least);
                prop_assert!(reach(choice.best.terms.prefill, choice.best.of()));
                let (best, _, equal, allowed) = summary(&choice);
                prop_assert_eq!(allowed, cheapest.len());
                prop_assert_eq!(equal, cheapest.values().filter(|ms| **ms == least).count());
                cheapest.remove(&best);
                let next = cheapest.values().copied().min_by(f64::total_cmp);
                prop_assert_eq!(choice.runner_up.map(|next| next.terms.cost()), next);
            }
        }
    }
}
