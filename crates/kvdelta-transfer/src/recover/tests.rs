use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn recovery(settings: RecoverySettings) -> Recovery {
    Recovery::new(settings).unwrap()
}

/// Asking again is faster: all of a long prompt is missing and its blocks are small.
const ALL_MISSING: Stale = Stale {
    missing_tokens: 100_000,
    context_tokens: 100_000,
    offered_bytes: 1 << 20,
    skipped_bytes: 1 << 30,
};

#[test]
fn the_faster_way_is_taken() {
    let mib = 1 << 20;
    let table = [
        (
            "all of a long prompt is missing",
            100_000,
            100_000,
            100 * mib,
            900 * mib,
            Choice::AskAgain,
        ),
        (
            "one block of a long prompt",
            116,
            100_000,
            mib,
            1000 * mib,
            Choice::Recompute,
        ),
        ("a short prompt", 90, 100, mib / 4, mib, Choice::Recompute),
        (
            "the bytes take longer than the tokens",
            100_000,
            100_000,
            mib,
            1_000_000 * mib,
            Choice::Recompute,
        ),
        (
            "half of it, so half of the bytes",
            50_000,
            100_000,
            mib,
            10_000 * mib,
            Choice::AskAgain,
        ),
        ("nothing", 0, 0, 0, 0, Choice::Recompute),
    ];
    for (name, missing_tokens, context_tokens, offered_bytes, skipped_bytes, expected) in table {
        let stale = Stale {
            missing_tokens,
            context_tokens,
            offered_bytes,
            skipped_bytes,
        };
        let mut recovery = recovery(RecoverySettings::default());
        assert_eq!(recovery.choose(&stale, Millis(0)), expected, "{name}");
    }
}

#[test]
fn the_estimates_count_what_each_way_takes() {
    let recovery = recovery(RecoverySettings {
        prefill_tokens_per_second: 1000.0,
        decode_tokens_per_second: 500.0,
        link_bytes_per_second: 1e6,
        ..RecoverySettings::default()
    });
    // Missing of a context of 1000 tokens, with 2000 bytes offered and 8000 skipped: milliseconds of computing
    // here, of bytes the second time.
    for (missing_tokens, recompute, transfer) in [
        (0, 0.0, 2.0),
        // No less than was offered, since that is what it lacks at least.
        (100, 200.0, 2.0),
        (500, 1000.0, 5.0),
        (1000, 2000.0, 10.0),
        // No more than there is.
        (5000, 10_000.0, 10.0),
    ] {
        let stale = Stale {
            missing_tokens,
            context_tokens: 1000,
            offered_bytes: 2000,
            skipped_bytes: 8000,
        };
        assert_eq!(recovery.recompute_ms(&stale), recompute);
        // A detour of 20 ms, and a tenth of the prompt at prefill: 100 ms.
        assert_eq!(recovery.ask_again_ms(&stale), 120.0 + transfer);
    }
}

#[test]
fn measurements_change_the_choice() {
    let mut recovery = recovery(RecoverySettings::default());
    assert_eq!(recovery.choose(&ALL_MISSING, Millis(0)), Choice::AskAgain);
    // A link of 25 MB/s takes 43 s for what is computed in 20.
    for _ in 0..40 {
        recovery.observe_transfer(25_000_000, 1000.0);
    }
    assert_eq!(recovery.choose(&ALL_MISSING, Millis(0)), Choice::Recompute);
    for _ in 0..40 {
        recovery.observe_decode_prefill(500, 1000.0);
    }
    assert_eq!(recovery.choose(&ALL_MISSING, Millis(0)), Choice::AskAgain);
}

/// How many of `times` claims at `now` are asked again.
fn asked(recovery: &mut Recovery, times: u32, now: u64) -> u32 {
    (0..times)
        .map(|_| u32::from(recovery.choose(&ALL_MISSING, Millis(now)) == Choice::AskAgain))
        .sum()
}

#[test]
fn a_burst_gets_the_budget_and_no_more() {
    let mut recovery = recovery(RecoverySettings::default());
    assert_eq!(asked(&mut recovery, 1000, 5), 10);
    // A second brings one, ten claims that held another.
    assert_eq!(asked(&mut recovery, 1000, 1004), 0);
    assert_eq!(asked(&mut recovery, 1000, 1005), 1);
    for _ in 0..9 {
        recovery.confirmed(Millis(1005));
    }
    assert_eq!(asked(&mut recovery, 1000, 1005), 0);
    recovery.confirmed(Millis(1005));
    assert_eq!(asked(&mut recovery, 1000, 1005), 1);
    // No pause and no number of good claims saves up more.
    for _ in 0..10_000 {
        recovery.confirmed(Millis(1_000_000));
    }
    assert_eq!(asked(&mut recovery, 1000, 1_000_000), 10);
}

#[test]
fn recomputing_takes_nothing_from_the_budget() {
    let mut recovery = recovery(RecoverySettings::default());
    for _ in 0..1000 {
        assert_eq!(
            recovery.choose(&Stale::default(), Millis(0)),
            Choice::Recompute
        );
    }
    assert_eq!(asked(&mut recovery, 1000, 0), 10);
}

#[test]
fn a_budget_of_none_is_never_filled() {
    let mut recovery = recovery(RecoverySettings {
        budget: 0,
        budget_per_second: f64::MAX,
        share: f64::MAX,
        ..RecoverySettings::default()
    });
    recovery.confirmed(Millis(0));
    assert_eq!(asked(&mut recovery, 10, u64::MAX), 0);
}

#[test]
fn settings_that_are_no_numbers_are_refused_by_name() {
    type Field = fn(&mut RecoverySettings) -> &mut f64;
    let rates: [(&str, Field); 3] = [
        ("prefill_tokens_per_second", |s| {
            &mut s.prefill_tokens_per_second
        }),
        ("decode_tokens_per_second", |s| {
            &mut s.decode_tokens_per_second
        }),
        ("link_bytes_per_second", |s| &mut s.link_bytes_per_second),
    ];
    for (name, field) in rates {
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE] {
            let mut settings = RecoverySettings::default();
            *field(&mut settings) = value;
            let error = Recovery::new(settings).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}: {value} ")), "{error}");
        }
    }
    let fillings: [(&str, Field); 2] = [
        ("budget_per_second", |s| &mut s.budget_per_second),
        ("share", |s| &mut s.share),
    ];
    for (name, field) in fillings {
        for value in [-1.0, f64::NAN, f64::INFINITY] {
            let mut settings = RecoverySettings::default();
            *field(&mut settings) = value;
            let error = Recovery::new(settings).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}: {value} ")), "{error}");
        }
        let mut settings = RecoverySettings::default();
        *field(&mut settings) = 0.0;
        assert!(Recovery::new(settings).is_ok());
    }
}

/// Whether the estimates alone speak for asking again.
fn asks(settings: RecoverySettings, stale: &Stale) -> bool {
    let settings = RecoverySettings {
        budget: 1,
        ..settings
    };
    recovery(settings).choose(stale, Millis(0)) == Choice::AskAgain
}

fn rate() -> impl Strategy<Value = f64> {
    (-3.0..15.0_f64).prop_map(|power| 10_f64.powf(power))
}

fn settings() -> impl Strategy<Value = RecoverySettings> {
    (rate(), rate(), rate()).prop_map(|(prefill, decode, link)| RecoverySettings {
        prefill_tokens_per_second: prefill,
        decode_tokens_per_second: decode,
        link_bytes_per_second: link,
        ..RecoverySettings::default()
    })
}

/// Of any size, small ones as often as large ones.
fn count() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0..64_u32).prop_map(|(count, shift)| count >> shift)
}

fn stale() -> impl Strategy<Value = Stale> {
    (count(), count(), count(), count()).prop_map(|(missing, context, offered, skipped)| Stale {
        missing_tokens: missing,
        context_tokens: context,
        offered_bytes: offered,
        skipped_bytes: skipped,
    })
}

/// A prompt as engines have them, on links and engines as they are.
fn plausible() -> impl Strategy<Value = (RecoverySettings, Stale)> {
    let settings = (10.0..1e6, 10.0..1e6, 1e6..1e11);
    (
        settings,
        1..1_000_000_u64,
        0..1_000_000_u64,
        0..1_u64 << 20,
        0.0..1.0,
    )
        .prop_map(
            |((prefill, decode, link), context_tokens, missing, bytes_per_token, cut)| {
                let all: u64 = context_tokens * bytes_per_token;
                let per_mille = Duration::from_secs_f64(cut).subsec_millis();
                let offered_bytes = all / 1000 * u64::from(per_mille);
                let settings = RecoverySettings {
                    prefill_tokens_per_second: prefill,
                    decode_tokens_per_second: decode,
                    link_bytes_per_second: link,
                    ..RecoverySettings::default()
                };
                let stale = Stale {
                    missing_tokens: missing % (context_tokens + 1),
                    context_tokens,
                    offered_bytes,
                    skipped_bytes: all - offered_bytes,
                };
                (settings, stale)
            },
        )
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Choose,
    Confirmed,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn more_missing_tokens_never_turn_the_choice_to_recompute(
        (settings, stale) in plausible(),
        less in 0.0..1.0,
    ) {
        let per_mille = u64::from(Duration::from_secs_f64(less).subsec_millis());
        let fewer = Stale { missing_tokens: stale.missing_tokens * per_mille / 1000, ..stale };
        prop_assert!(!asks(settings, &fewer) || asks(settings, &stale));
    }

    #[test]
    fn a_faster_link_or_slower_decode_never_turns_the_choice_to_recompute(
        settings in settings(), stale in stale(), other in rate(), of_link in any::<bool>(),
    ) {
        let mut changed = settings;
        if of_link {
            changed.link_bytes_per_second = other.max(settings.link_bytes_per_second);
        } else {
            changed.decode_tokens_per_second = other.min(settings.decode_tokens_per_second);
        }
        prop_assert!(!asks(settings, &stale) || asks(changed, &stale));
    }

    #[test]
    fn no_input_harms(
        start in (any::<f64>(), any::<f64>(), any::<f64>(), any::<f64>(), any::<f64>()),
        fallback in settings(),
        budget in 0..4_u32,
        calls in vec((0..4, count(), any::<f64>(), stale(), any::<u64>()), 0..40),
    ) {
        let any = RecoverySettings {
            prefill_tokens_per_second: start.0,
            decode_tokens_per_second: start.1,
            link_bytes_per_second: start.2,
            budget,
            budget_per_second: start.3,
            share: start.4,
        };
        let mut recovery = Recovery::new(any).or(Recovery::new(fallback)).unwrap();
        for (call, amount, ms, stale, now) in calls {
            match call {
                0 => recovery.confirmed(Millis(now)),
                1 => recovery.observe_decode_prefill(amount, ms),
                2 => recovery.observe_transfer(amount, ms),
                _ => {
                    recovery.choose(&stale, Millis(now));
                }
            }
            for estimate in [recovery.recompute_ms(&stale), recovery.ask_again_ms(&stale)] {
                prop_assert!(estimate.is_finite() && estimate >= 0.0);
            }
            for rate in [recovery.decode_rate(), recovery.link_rate()] {
                prop_assert!(kvdelta_overlap::Rate::try_from(rate.per_ms()).is_ok());
            }
            let budget = &recovery.budget;
            prop_assert!((-ROUNDING..=budget.most).contains(&budget.left));
        }
    }

    /// Against a bucket in whole millionths, and by the bound for every window.
    #[test]
    fn the_budget_is_kept_in_every_window(
        budget in 0..5_u32,
        per_mille_a_second in 0..5000_u64,
        share_per_mille in 0..2000_u64,
        calls in vec(
            (
                prop_oneof![8 => 0..300_i64, 1 => -2000..0_i64, 1 => 0..100_000_i64],
                prop_oneof![Just(Call::Choose), Just(Call::Confirmed)],
            ),
            1..120,
        ),
    ) {
        let mut recovery = recovery(RecoverySettings {
            budget,
            budget_per_second: per_mille_a_second as f64 / 1000.0,
            share: share_per_mille as f64 / 1000.0,
            ..RecoverySettings::default()
        });
        let most = u64::from(budget) * 1_000_000;
        let (mut now, mut latest, mut left) = (1_000_000_u64, None, most);
        // By call: the latest time so far, what a claim that held brought, whether a repeat was given.
        let mut history = Vec::new();
        for (tick, call) in calls {
            now = now.saturating_add_signed(tick);
            let before = latest.unwrap_or(now);
            let time = before.max(now);
            latest = Some(time);
            left = most.min(left + (time - before) * per_mille_a_second);
            match call {
                Call::Choose => {
                    let given = left >= 1_000_000;
                    left -= if given { 1_000_000 } else { 0 };
                    let choice = recovery.choose(&ALL_MISSING, Millis(now));
                    prop_assert_eq!(choice == Choice::AskAgain, given);
                    history.push((time, 0, u64::from(given)));
                }
                Call::Confirmed => {
                    left = most.min(left + share_per_mille * 1000);
                    recovery.confirmed(Millis(now));
                    history.push((time, share_per_mille * 1000, 0));
                }
            }
        }
        for first in 0..history.len() {
            let (mut held, mut given) = (0, 0);
            for (time, share, repeat) in &history[first..] {
                held += share;
                given += repeat * 1_000_000;
                let filled = (time - history[first].0) * per_mille_a_second;
                prop_assert!(given <= most + filled + held);
            }
        }
    }
}
