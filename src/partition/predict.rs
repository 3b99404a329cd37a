//! What a stage would need, from what layers were measured to need: sums over its layers, straight lines over batch sizes, logarithms over degrees
//! ([`Fit`] has another curve, which is closer where the degree was not measured and much is fixed).
//!
//! Two guards are ours. All that is in memory is fixed or is divided among the GPUs of a stage, as the paper's formulas have it (III.B), so what d GPUs hold is at least `D/d` of what D hold, where D
//! is the largest measured degree; a logarithm goes below that and even below nothing. And likewise what a part of a batch needs is at least that part of what the batch needs, which
//! matters for the first and the last sample of a line of noisy points.
//!
//! The paper leaves 1F1B out. With it the p-th stage from the end keeps the activations of `min(p, m)` of m micro-batches, while the profile was taken with all m (GPipe): so what it needs is
//! sampled from the same line, at that part of the batch.

use super::profile::{Fit, Parallelism, Profile, Schedule};
use super::{Measurement, PartitionError};
use crate::units::Bytes;

/// Layers of a stage, the first and the last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group {
    /// The first.
    pub first: usize,
    /// The last; not before the first.
    pub last: usize,
}

/// How a stage is shared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Config {
    /// In which way.
    pub parallelism: Parallelism,
    /// Among how many GPUs.
    pub degree: u32,
}

/// Not shared.
const ALONE: Config = Config { parallelism: Parallelism::Pipeline, degree: 1 };

/// What was measured of one config, at each of its batch sizes.
#[derive(Debug)]
struct Curve {
    config: Config,
    samples: Vec<Sample>,
}

/// What was measured of one config at one batch size. Whole numbers, which are exact to 2^53, thousands of times what a GPU has.
#[derive(Debug)]
struct Sample {
    batch_size: u64,
    isolated: Vec<f64>,
    /// What layers 1 to this one add, all together.
    sums: Vec<f64>,
}

impl Sample {
    fn of(measurement: &Measurement) -> Sample {
        let sums = measurement.added.iter().scan(0_i128, |sum, added| {
            *sum += i128::from(*added);
            Some(*sum as f64)
        });
        let sums = sums.collect();
        let isolated = measurement.isolated.iter().map(|bytes| bytes.get() as f64).collect();
        Sample { batch_size: measurement.batch_size, isolated, sums }
    }

    /// M_p, at this batch size.
    fn bytes(&self, group: Group) -> f64 {
        self.isolated[group.first] + (self.sums[group.last] - self.sums[group.first])
    }
}

/// Says what stages would need.
#[derive(Debug)]
pub struct Predictor {
    curves: Vec<Curve>,
    target: u64,
    schedule: Schedule,
    microbatches: u64,
    fit: Fit,
}

impl Predictor {
    /// From a profile, for the batch size and the schedule that it says.
    pub fn new(profile: &Profile) -> Predictor {
        let mut curves: Vec<Curve> = Vec::new();
        // They are sorted by config.
        for one in profile.measurements() {
            let config = Config { parallelism: one.parallelism, degree: one.degree };
            match curves.last_mut().filter(|curve| curve.config == config) {
                Some(curve) => curve.samples.push(Sample::of(one)),
                None => curves.push(Curve { config, samples: vec![Sample::of(one)] }),
            }
        }
        let (schedule, microbatches) = (profile.schedule(), profile.microbatches());
        Predictor { curves, target: profile.target_batch_size(), schedule, microbatches, fit: profile.fit() }
    }

    /// Every config that can be predicted with at most so many GPUs: what was measured, what lies between, and above the two largest degrees measured what a logarithm through them says.
    pub fn configs(&self, degree_max: u32) -> Vec<Config> {
        let mut configs = vec![ALONE];
        for parallelism in [Parallelism::Data, Parallelism::Tensor] {
            let measured: Vec<u32> = self.degrees(parallelism).collect();
            let (Some(&least), Some(&most)) = (measured.first(), measured.last()) else { continue };
            let last = if measured.len() > 1 { degree_max } else { most.min(degree_max) };
            let powers = (1..u32::BITS).map(|power| 1_u32 << power).take_while(|degree| *degree <= last);
            configs.extend(powers.filter(|degree| *degree >= least).map(|degree| Config { parallelism, degree }));
        }
        configs
    }

    /// How many stages from the end need different amounts: as many as there are micro-batches, or with GPipe one, as all are alike.
    pub fn depths(&self) -> u64 {
        match self.schedule {
            Schedule::GPipe => 1,
            Schedule::OneForwardOneBackward => self.microbatches,
        }
    }

    /// What one GPU of a stage needs that is the `depth`-th from the end; the last is the first of those.
    ///
    /// # Errors
    ///
    /// The measurements say that it needs nothing, or do not say enough.
    pub fn stage(&self, group: Group, config: Config, depth: u64) -> Result<Bytes, PartitionError> {
        let part = match self.schedule {
            Schedule::GPipe => 1.0,
            Schedule::OneForwardOneBackward => depth.min(self.microbatches) as f64 / self.microbatches as f64,
        };
        let target = self.target as f64;
        let mut bytes = self.at(group, config, target * part)?;
        if part < 1.0 {
            bytes = bytes.max(self.at(group, config, target)? * part);
        }
        // Half a byte is none.
        if bytes.round() < 1.0 {
            return Err(impossible(group, config, target * part, bytes));
        }
        // Larger than any device is enough said.
        Ok(Bytes::new(bytes.round() as u64).min(Bytes::LARGEST))
    }

    /// What one GPU of a stage needs at a batch size, as lines and logarithms say.
    ///
    /// # Errors
    ///
    /// It was measured at one batch size, and is asked for at another.
    pub fn at(&self, group: Group, config: Config, batch: f64) -> Result<f64, PartitionError> {
        if let Some(curve) = self.curve(config) {
            return self.scaled(curve, group, batch);
        }
        // The neighbours, or the two largest.
        let (mut below, mut above) = (None, None);
        for curve in self.curves.iter().filter(|curve| curve.config.parallelism == config.parallelism) {
            (below, above) = (above, Some(curve));
            if curve.config.degree > config.degree {
                break;
            }
        }
        let (Some(below), Some(above)) = (below, above) else {
            // Nobody asks for what is not offered.
            return Err(PartitionError::Untold {
                parallelism: config.parallelism,
                degree: config.degree,
                batch_size: self.target,
                metric: super::Metric::Isolated,
                layer: group.first,
                wanted: "a measurement of this degree, or of two below it,".to_owned(),
            });
        };
        let point = |curve: &Curve| Ok((f64::from(curve.config.degree), self.scaled(curve, group, batch)?));
        let (points, degree) = ([point(below)?, point(above)?], f64::from(config.degree));
        let [_, (most, least)] = points;
        let on_curve = match self.fit {
            // Degrees are powers of two, whose binary logarithms are exact.
            Fit::Logarithm => curve(points, degree, f64::log2),
            Fit::Inverse => curve(points, degree, f64::recip),
        };
        // Between two that were measured there is nothing to guard against.
        Ok(if degree > most { on_curve.max(least * most / degree) } else { on_curve })
    }

    /// Whether something of this degree was measured.
    pub fn is_measured(&self, config: Config) -> bool {
        self.curve(config).is_some()
    }

    fn curve(&self, config: Config) -> Option<&Curve> {
        self.curves.iter().find(|curve| curve.config == config)
    }

    fn degrees(&self, parallelism: Parallelism) -> impl Iterator<Item = u32> {
        self.curves.iter().filter(move |curve| curve.config.parallelism == parallelism).map(|curve| curve.config.degree)
    }

    /// What was measured, at a batch size at which it was not.
    fn scaled(&self, curve: &Curve, group: Group, batch: f64) -> Result<f64, PartitionError> {
        let point = |sample: &Sample| (sample.batch_size as f64, sample.bytes(group));
        let sample = match curve.samples.as_slice() {
            [sample] => sample,
            [low, high] => return Ok(through([point(low), point(high)], batch)),
            samples => return Ok(closest(&samples.iter().map(point).collect::<Vec<_>>(), batch)),
        };
        let (measured, bytes) = (sample.batch_size as f64, sample.bytes(group));
        if measured == batch {
            return Ok(bytes);
        }
        if curve.config == ALONE {
            return Err(PartitionError::OneBatch { measured: sample.batch_size, wanted: batch });
        }
        // As an unshared stage does.
        let alone = |batch| self.at(group, ALONE, batch);
        let base = alone(measured)?;
        if base <= 0.0 {
            return Err(impossible(group, ALONE, measured, base));
        }
        Ok(bytes * alone(batch)? / base)
    }
}

fn impossible(group: Group, config: Config, batch: f64, bytes: f64) -> PartitionError {
    let (Group { first, last }, Config { parallelism, degree }) = (group, config);
    PartitionError::Impossible { first, last, parallelism, degree, batch, bytes }
}

/// The straight line through two points, at x: to the byte where it was measured.
fn through([(x0, y0), (x1, y1)]: [(f64, f64); 2], x: f64) -> f64 {
    if x == x1 { y1 } else { y0 + (y1 - y0) * (x - x0) / (x1 - x0) }
}

/// The straight line closest to several points, at x.
fn closest(points: &[(f64, f64)], x: f64) -> f64 {
    let count = points.len() as f64;
    let middle_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
    let middle_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let spread: f64 = points.iter().map(|(x, _)| (x - middle_x).powi(2)).sum();
    let together: f64 = points.iter().map(|(x, y)| (x - middle_x) * (y - middle_y)).sum();
    middle_y + together / spread * (x - middle_x)
}

/// The curve `y = a + b f(d)` through two points, at d.
fn curve([(d0, y0), (d1, y1)]: [(f64, f64); 2], d: f64, f: fn(f64) -> f64) -> f64 {
    y0 + (y1 - y0) * (f(d) - f(d0)) / (f(d1) - f(d0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(parallelism: Parallelism, degree: u32, batch_size: u64, isolated: &[u64], added: &[i64]) -> Measurement {
        let isolated = isolated.iter().map(|bytes| Bytes::new(*bytes)).collect();
        Measurement { parallelism, degree, batch_size, isolated, added: added.to_vec() }
    }

    fn predictor(target: u64, measurements: Vec<Measurement>) -> Predictor {
        let layers = measurements[0].isolated.len();
        Predictor::new(&Profile::new(vec![1; layers], measurements, target).unwrap())
    }

    const ALL: Group = Group { first: 0, last: 2 };

    #[test]
    fn a_stage_is_its_first_layer_and_what_the_others_add_on_a_line_through_batch_sizes() {
        use Parallelism::Pipeline;
        // At batch 2: 100 + 30 − 5 = 125; at 4: 180 + 50 − 5 = 225; so at 8: 425.
        let predictor = predictor(
            8,
            vec![
                one(Pipeline, 1, 2, &[100, 90, 80], &[7, 30, -5]),
                one(Pipeline, 1, 4, &[180, 160, 140], &[9, 50, -5]),
            ],
        );
        let bytes = |first, last| predictor.stage(Group { first, last }, ALONE, 1).unwrap().get();
        assert_eq!((bytes(0, 2), bytes(0, 0), bytes(1, 2), bytes(2, 2)), (425, 340, 300 - 5, 260));
        assert_eq!(predictor.at(ALL, ALONE, 4.0).unwrap(), 225.0);
        assert_eq!(predictor.at(ALL, ALONE, 2.0).unwrap(), 125.0);
        assert_eq!(predictor.configs(8), [ALONE]);
    }

    #[test]
    fn more_batch_sizes_give_the_line_closest_to_them() {
        // Slope (−1·−10 + 1·20)/2 = 15 through (2, 110).
        let points = [(1.0, 100.0), (2.0, 100.0), (3.0, 130.0)];
        assert_eq!(closest(&points, 5.0), 155.0);
    }

    #[test]
    fn higher_degrees_are_on_a_logarithm_that_does_not_go_below_what_is_possible() {
        use Parallelism::{Data, Pipeline, Tensor};
        let predictor = predictor(
            4,
            vec![
                one(Pipeline, 1, 4, &[1000, 1000, 1000], &[0, 500, 500]),
                one(Data, 2, 4, &[800, 1, 1], &[0, 400, 400]),
                one(Data, 4, 4, &[700, 1, 1], &[0, 350, 350]),
                one(Tensor, 2, 4, &[500, 500, 500], &[0, 250, 250]),
                one(Tensor, 8, 4, &[125, 125, 125], &[0, 62, 63]),
            ],
        );
        let bytes = |parallelism, degree| predictor.stage(ALL, Config { parallelism, degree }, 1).unwrap().get();
        // 1600 and 1400, so 200 less with every doubling.
        assert_eq!((bytes(Data, 2), bytes(Data, 4), bytes(Data, 8), bytes(Data, 16)), (1600, 1400, 1200, 1000));
        // 1000 at 2 and 250 at 8, so 375 less with every doubling: 625 between, and below nothing at 32, where 250·8/32 are possible.
        assert_eq!((bytes(Tensor, 4), bytes(Tensor, 16), bytes(Tensor, 32)), (625, 125, 63));
        // What is fixed and what is divided: 1200 + 800/d, and 2000/d.
        let inverse = Predictor { fit: Fit::Inverse, ..predictor };
        let bytes = |parallelism, degree| inverse.stage(ALL, Config { parallelism, degree }, 1).unwrap().get();
        assert_eq!((bytes(Data, 8), bytes(Data, 16), bytes(Tensor, 4), bytes(Tensor, 32)), (1300, 1250, 500, 63));
        let predictor = inverse;
        let degrees: Vec<u32> = predictor.configs(16).iter().map(|config| config.degree).collect();
        assert_eq!(degrees, [1, 2, 4, 8, 16, 2, 4, 8, 16]);
    }

    #[test]
    fn what_was_measured_at_one_batch_size_grows_as_an_unshared_stage() {
        use Parallelism::{Data, Pipeline};
        let measurements = vec![
            one(Pipeline, 1, 2, &[100], &[0]),
            one(Pipeline, 1, 4, &[150], &[0]),
            one(Data, 4, 4, &[90], &[0]),
            one(Data, 8, 4, &[80], &[0]),
        ];
        let predictor = predictor(8, measurements.clone());
        let (group, config) = (Group { first: 0, last: 0 }, Config { parallelism: Data, degree: 4 });
        // Unshared it is 250 at 8 and 150 at 4.
        assert_eq!(predictor.stage(group, config, 1).unwrap().get(), 150);
        // Below the smallest degree measured nothing is offered.
        assert_eq!(predictor.configs(8).len(), 3);
        let of_one = Profile::new(vec![1], vec![measurements[1].clone()], 8).unwrap();
        let error = Predictor::new(&of_one).stage(group, ALONE, 1).unwrap_err();
        assert!(error.to_string().contains("at batch size 4 only, and batch size 8 is asked for"), "{error}");
        let of_one = Profile::new(vec![1], vec![measurements[1].clone()], 4).unwrap();
        assert_eq!(Predictor::new(&of_one).stage(group, ALONE, 1).unwrap().get(), 150);
        // One degree has no logarithm.
        let of_two = Profile::new(vec![1], measurements[..3].to_vec(), 8).unwrap();
        assert_eq!(Predictor::new(&of_two).configs(16), [ALONE, config]);
        assert!(Predictor::new(&of_two).stage(group, Config { degree: 8, ..config }, 1).is_err());
    }

    #[test]
    fn with_1f1b_a_stage_keeps_as_many_micro_batches_as_stages_are_behind_it_and_its_own() {
        let measurements =
            vec![one(Parallelism::Pipeline, 1, 4, &[140], &[0]), one(Parallelism::Pipeline, 1, 8, &[180], &[0])];
        let profile = Profile::new(vec![1], measurements, 16).unwrap();
        let predictor = Predictor::new(&profile.clone().scheduled(Schedule::OneForwardOneBackward, 4).unwrap());
        let group = Group { first: 0, last: 0 };
        let bytes = [1, 2, 3, 4, 5].map(|depth| predictor.stage(group, ALONE, depth).unwrap().get());
        // 100 and 10 for each sample: 4, 8, 12 and 16 of them.
        assert_eq!(bytes, [140, 180, 220, 260, 260]);
        assert_eq!((predictor.depths(), Predictor::new(&profile).depths()), (4, 1));
        // A line that says nothing is left of a small part is held against what the whole needs.
        let steep = vec![one(Parallelism::Pipeline, 1, 4, &[10], &[0]), one(Parallelism::Pipeline, 1, 8, &[50], &[0])];
        let steep = Profile::new(vec![1], steep, 16).unwrap().scheduled(Schedule::OneForwardOneBackward, 4).unwrap();
        assert_eq!(Predictor::new(&steep).stage(group, ALONE, 1).unwrap().get(), 33);
    }

    #[test]
    fn measurements_by_which_a_stage_needs_nothing_are_named() {
        let measurements = vec![
            one(Parallelism::Pipeline, 1, 4, &[140, 100], &[0, -200]),
            one(Parallelism::Pipeline, 1, 8, &[180, 100], &[0, -200]),
        ];
        let error = predictor(16, measurements).stage(Group { first: 0, last: 1 }, ALONE, 1);
        assert!(error.is_ok(), "180 + 2 · 40 − 200 = 60");
        let measurements = vec![one(Parallelism::Pipeline, 1, 16, &[140, 100], &[0, -200])];
        let error = predictor(16, measurements).stage(Group { first: 0, last: 1 }, ALONE, 1).unwrap_err().to_string();
        assert!(error.contains("contradictory measurements: by them layers 0 to 1 need -60 bytes"), "{error}");
    }
}
