//! Settings of spans: the server's option, and the standard variables of the environment.

use std::time::Duration;

use opentelemetry::trace::SpanKind;
use opentelemetry::TraceId;
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, ShouldSample};
use tierbed_core::{Error, Result};

use crate::origin::Trace;

/// Where spans go, and which.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) endpoint: String,
    pub(super) sampling: Sampling,
    pub(super) sizes: Sizes,
}

/// How many spans are sent at once, and how often. Defaults are those of the standard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) queue_spans_max: usize,
    pub(super) batch_spans_max: usize,
    pub(super) delay: Duration,
}

/// Which requests have spans.
#[derive(Debug, Clone)]
pub(super) struct Sampling {
    /// Whether a caller decides for its requests.
    is_parent_based: bool,
    root: Sampler,
}

/// The variables that name a collector; the first one goes before the other.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";

impl Settings {
    /// Reads settings; `endpoint` is the option. `None` where no collector is named, or the
    /// environment turns spans off.
    ///
    /// # Errors
    /// `Invalid` for a value that is none.
    pub(super) fn read(
        endpoint: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>> {
        let first = |names: [&str; 2]| names.into_iter().find_map(&variable);
        let endpoint = match endpoint {
            Some(endpoint) => endpoint.to_owned(),
            None => {
                let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|is| is == "true")
                    || variable("OTEL_TRACES_EXPORTER").is_some_and(|name| name == "none");
                let Some(endpoint) = first(ENDPOINTS).filter(|_| !is_off) else { return Ok(None) };
                if let Some(protocol) = first(PROTOCOLS).filter(|protocol| protocol != "grpc") {
                    return Err(Error::invalid("spans are sent by gRPC")
                        .with(PROTOCOLS[1], protocol)
                        .with("remedy", "set it to grpc, and name the collector's port of gRPC"));
                }
                endpoint
            }
        };
        if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            return Err(wrong_endpoint(&endpoint));
        }
        let sampling = Sampling::read(variable(SAMPLER).as_deref(), variable(SAMPLER_ARG))?;
        Ok(Some(Self { endpoint, sampling, sizes: Sizes::read(&variable)? }))
    }
}

/// Refuses an address that is none.
pub(super) fn wrong_endpoint(found: &str) -> Error {
    Error::invalid("a collector is named by scheme, host and port")
        .with("otlp_endpoint", found)
        .with("remedy", "write http://host:4317, or https:// where it has a certificate")
}

impl Sizes {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let number = |name: &'static str, default: u64| {
            let Some(text) = variable(name) else { return Ok(default) };
            text.trim().parse().ok().filter(|number| *number > 0).ok_or_else(|| {
                Error::invalid("a size of spans is a whole number above 0")
                    .with("variable", name)
                    .with("found", text)
                    .with("remedy", format_args!("leave it out for {default}"))
            })
        };
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let queue_spans_max = count(number("OTEL_BSP_MAX_QUEUE_SIZE", 2_048)?);
        let batch_spans_max = count(number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?);
        Ok(Self {
            queue_spans_max,
            batch_spans_max: batch_spans_max.min(queue_spans_max),
            delay: Duration::from_millis(number("OTEL_BSP_SCHEDULE_DELAY", 5_000)?),
        })
    }
}

impl Sampling {
    fn read(name: Option<&str>, ratio: Option<String>) -> Result<Self> {
        let name = name.unwrap_or("parentbased_always_on");
        let (is_parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let root = match root {
            "always_on" => Sampler::AlwaysOn,
            "always_off" => Sampler::AlwaysOff,
            "traceidratio" => Sampler::TraceIdRatioBased(share(ratio)?),
            _ => {
                return Err(Error::invalid("no such sampler of traces").with(SAMPLER, name).with(
                    "remedy",
                    "use always_on, always_off or traceidratio, or one of them \
                                     with parentbased_ before it",
                ));
            }
        };
        Ok(Self { is_parent_based, root })
    }

    /// Tells whether a request has spans; `has_caller`: its trace says what its caller does.
    pub(super) fn takes(&self, trace: &Trace, has_caller: bool) -> bool {
        if has_caller && self.is_parent_based {
            return trace.is_sampled();
        }
        let id = TraceId::from_hex(trace.trace_id()).unwrap_or(TraceId::INVALID);
        let result = self.root.should_sample(None, id, "", &SpanKind::Server, &[], &[]);
        result.decision == SamplingDecision::RecordAndSample
    }
}

/// Parses the share of traces; all without one.
fn share(text: Option<String>) -> Result<f64> {
    let Some(text) = text else { return Ok(1.0) };
    let share = text.trim().parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| {
        Error::invalid("a share of traces is a number from 0 to 1")
            .with(SAMPLER_ARG, text)
            .with("remedy", "0.01 takes one of a hundred")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Option<&str>, set: &[(&str, &str)]) -> Result<Option<Settings>> {
        let find = |name: &str| set.iter().find(|(known, _)| *known == name);
        Settings::read(endpoint, |name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    fn sampling(name: &str, ratio: &str) -> Sampling {
        Sampling::read(Some(name), Some(ratio.to_owned())).unwrap()
    }

    #[test]
    fn the_option_goes_before_the_environment() {
        let other = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:1"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_SDK_DISABLED", "true"),
        ];
        let endpoint = |option, set: &[_]| read(option, set).unwrap().map(|found| found.endpoint);
        assert_eq!(endpoint(Some("http://own:1"), &other).as_deref(), Some("http://own:1"));
        assert_eq!(endpoint(None, &other), None, "it is turned off");
        assert_eq!(endpoint(None, &[]), None);
        assert_eq!(endpoint(None, &other[..1]).as_deref(), Some("http://other:1"));
        let none = ("OTEL_TRACES_EXPORTER", "none");
        assert_eq!(endpoint(None, &[other[0], none]), None);
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:2");
        assert_eq!(endpoint(None, &[other[0], own]).as_deref(), Some("https://traces:2"));
    }

    #[test]
    fn a_wrong_value_is_refused_and_its_remedy_followed() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1");
        let ratio = (SAMPLER, "traceidratio");
        let queue = "OTEL_BSP_MAX_QUEUE_SIZE";
        for (before, name, wrong, right, remedy) in [
            (endpoint, ENDPOINTS[0], "a:4317", "http://a:4317", "write http://host:4317"),
            (endpoint, PROTOCOLS[1], "http/protobuf", "grpc", "set it to grpc"),
            (endpoint, SAMPLER, "jaeger_remote", "parentbased_always_on", "use always_on"),
            (ratio, SAMPLER_ARG, "2", "0.01", "0.01 takes one of a hundred"),
            (ratio, SAMPLER_ARG, "often", "1", "0.01 takes one of a hundred"),
            (endpoint, queue, "0", "", "leave it out for 2048"),
        ] {
            let told = read(None, &[endpoint, before, (name, wrong)]).unwrap_err().to_string();
            assert!(told.contains(&format!("remedy: {remedy}")), "{told}");
            let set = [endpoint, before, (name, right)];
            let set = if right.is_empty() { &set[..2] } else { &set };
            assert!(read(None, set).unwrap().is_some(), "{name}={right}");
        }
    }

    #[test]
    fn a_caller_decides_where_the_sampler_is_parent_based() {
        let trace = |is_sampled| Trace::new("0af7651916cd43dd8448eb211c80319c", 7, is_sampled);
        for (name, with_caller, without) in [
            ("parentbased_always_on", [true, false], true),
            ("parentbased_always_off", [true, false], false),
            ("always_on", [true, true], true),
            ("always_off", [false, false], false),
        ] {
            let sampling = sampling(name, "1");
            assert_eq!([true, false].map(|is| sampling.takes(&trace(is), true)), with_caller);
            assert_eq!(sampling.takes(&trace(true), false), without, "{name}");
        }
    }

    #[test]
    fn a_share_of_traces_is_taken_by_their_ids() {
        let quarter = sampling("parentbased_traceidratio", "0.25");
        let taken = (0..4_000).filter(|_| quarter.takes(&super::super::new_trace(), false));
        let taken = taken.count();
        assert!((800..1_200).contains(&taken), "{taken}");
        let trace = super::super::new_trace();
        let first = quarter.takes(&trace, false);
        assert!((0..10).all(|_| quarter.takes(&trace, false) == first), "by the id alone");
    }

    #[test]
    fn sizes_are_those_of_the_standard_unless_set() {
        let sizes = |set| read(Some("http://own:1"), set).unwrap().unwrap().sizes;
        let delay = Duration::from_secs(5);
        let standard = Sizes { queue_spans_max: 2_048, batch_spans_max: 512, delay };
        assert_eq!(sizes(&[]), standard);
        let few = Sizes { queue_spans_max: 8, batch_spans_max: 8, delay: Duration::from_millis(7) };
        let set = [("OTEL_BSP_MAX_QUEUE_SIZE", "8"), ("OTEL_BSP_SCHEDULE_DELAY", "7")];
        assert_eq!(sizes(&set), few);
    }
}
