"""A worker extension of a transport that is nobody's: it scales the last norm of the model, or breaks it."""

import torch


class WeightsWorker:
    def scale_norm(self, factor):
        with torch.no_grad():
            self.model_runner.get_model().model.norm.weight.mul_(factor)
        return [self.rank, float(factor)]

    def set_norm(self, values):
        with torch.no_grad():
            self.model_runner.get_model().model.norm.weight.copy_(torch.tensor(values))

    def get_norm(self):
        return self.model_runner.get_model().model.norm.weight.tolist()
