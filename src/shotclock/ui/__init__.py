"""UI executions: payloads of actions with budgets, the devices that they run on, and the daemon that keeps a device."""
